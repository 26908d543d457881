//! Naming a device: `cpu`, `cuda`, `cuda:1`, `hostile`.

use crate::hostile::RowOrders;
use std::fmt;
use std::str::FromStr;

/// Where to run, as people write it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DeviceName {
    /// `cpu`.
    Cpu,
    /// `cuda` (the first) or `cuda:N`.
    Cuda(usize),
    /// `hostile`, or `hostile:rows` where rows have orders of their own: a test device.
    Hostile(RowOrders),
}

/// Devices of one host that can be named.
const MOST: usize = 64;

/// Why a text names no device.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("'{0}' is no device; allowed: cpu, cuda, cuda:N with N from 0 to {last}, hostile, hostile:rows", last = MOST - 1)]
pub struct UnknownDevice(String);

impl FromStr for DeviceName {
    type Err = UnknownDevice;

    fn from_str(text: &str) -> Result<Self, UnknownDevice> {
        let unknown = || UnknownDevice(text.to_string());
        match text {
            "cpu" => Ok(Self::Cpu),
            "cuda" => Ok(Self::Cuda(0)),
            "hostile" => Ok(Self::Hostile(RowOrders::Equal)),
            "hostile:rows" => Ok(Self::Hostile(RowOrders::EachItsOwn)),
            _ => {
                let digits = text.strip_prefix("cuda:").ok_or_else(unknown)?;
                let plain = digits.bytes().all(|b| b.is_ascii_digit())
                    && (digits == "0" || !digits.starts_with('0'));
                match digits.parse() {
                    Ok(index) if plain && index < MOST => Ok(Self::Cuda(index)),
                    _ => Err(unknown()),
                }
            }
        }
    }
}

impl fmt::Display for DeviceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(index) => write!(f, "cuda:{index}"),
            Self::Hostile(RowOrders::Equal) => f.write_str("hostile"),
            Self::Hostile(RowOrders::EachItsOwn) => f.write_str("hostile:rows"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_and_written() {
        for (text, name) in [
            ("cpu", DeviceName::Cpu),
            ("cuda", DeviceName::Cuda(0)),
            ("cuda:0", DeviceName::Cuda(0)),
            ("cuda:63", DeviceName::Cuda(63)),
            ("hostile", DeviceName::Hostile(RowOrders::Equal)),
            ("hostile:rows", DeviceName::Hostile(RowOrders::EachItsOwn)),
        ] {
            assert_eq!(text.parse(), Ok(name));
            assert_eq!(name.to_string().parse(), Ok(name));
        }
        for bad in [
            "",
            "CPU",
            "cuda:",
            "cuda:64",
            "cuda:-1",
            "cuda:+1",
            "cuda:01",
            "cuda0",
            "cuda: 1",
            "cuda:99999999999999999999",
            "gpu",
            "hostile:",
            "hostile:1",
        ] {
            let error = bad.parse::<DeviceName>().unwrap_err().to_string();
            assert!(
                error.contains("allowed: cpu, cuda") && error.contains(bad),
                "{error}"
            );
        }
    }
}
