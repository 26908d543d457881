//! Parsers of single values. Each error says what is allowed; clap adds the flag and the value given.

/// Bytes, with an optional unit: 512MiB, 2GiB, 800MB, 1073741824.
pub fn size(text: &str) -> Result<u64, String> {
    let text = text.trim();
    let split = text
        .find(|c: char| !c.is_ascii_digit())
        .unwrap_or(text.len());
    let (digits, unit) = text.split_at(split);
    let factor: u64 = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "kb" => 1000,
        "kib" | "k" => 1 << 10,
        "mb" => 1_000_000,
        "mib" | "m" => 1 << 20,
        "gb" => 1_000_000_000,
        "gib" | "g" => 1 << 30,
        _ => {
            return Err(
                "a whole number of bytes, KiB, MiB or GiB is allowed, such as 512MiB".into(),
            );
        }
    };
    digits
        .parse::<u64>()
        .ok()
        .and_then(|n| n.checked_mul(factor))
        .filter(|n| (1..=1 << 46).contains(n))
        .ok_or_else(|| "1 byte to 64 TiB is allowed, such as 512MiB".into())
}

/// A temperature.
pub fn temperature(text: &str) -> Result<f32, String> {
    float(text, 0.0, 100.0)
}

/// Requests a second.
pub fn rate(text: &str) -> Result<f64, String> {
    match text.trim().parse::<f64>() {
        Ok(rate) if (0.001..=100_000.0).contains(&rate) => Ok(rate),
        _ => Err("a number from 0.001 to 100000 is allowed".into()),
    }
}

/// A probability that may not be 0.
pub fn top_p(text: &str) -> Result<f32, String> {
    match float(text, 0.0, 1.0) {
        Ok(p) if p > 0.0 => Ok(p),
        _ => Err("a number above 0 and up to 1 is allowed".into()),
    }
}

/// 0 to 1.
pub fn fraction(text: &str) -> Result<f32, String> {
    float(text, 0.0, 1.0)
}

/// Relative noise of logits.
pub fn noise(text: &str) -> Result<f64, String> {
    text.parse::<f64>()
        .ok()
        .filter(|x| *x > 0.0 && *x <= 1.0)
        .ok_or_else(|| "a number above 0 and up to 1 is allowed, such as 1e-6".into())
}

/// A repetition penalty.
pub fn repetition(text: &str) -> Result<f32, String> {
    match float(text, 0.0, 100.0) {
        Ok(r) if r > 0.0 => Ok(r),
        _ => Err("a number above 0 and up to 100 is allowed".into()),
    }
}

/// A presence or frequency penalty.
pub fn penalty(text: &str) -> Result<f32, String> {
    float(text, -100.0, 100.0)
}

/// `ID:BIAS`.
pub fn bias(text: &str) -> Result<(u32, f32), String> {
    let (id, bias) = text
        .split_once(':')
        .ok_or("ID:BIAS is allowed, such as 504:-100")?;
    let id = id
        .trim()
        .parse()
        .map_err(|_| "the part before ':' must be a token id")?;
    Ok((id, float(bias.trim(), -1e6, 1e6)?))
}

/// A whole number of a range.
pub fn whole<const LOW: u64, const HIGH: u64>(text: &str) -> Result<u64, String> {
    text.parse()
        .ok()
        .filter(|n| (LOW..=HIGH).contains(n))
        .ok_or_else(|| format!("a whole number from {LOW} to {HIGH} is allowed"))
}

/// A relative gap.
pub fn gap(text: &str) -> Result<f64, String> {
    above_zero(text, 1.0)
}

/// Odds of one step.
pub fn odds(text: &str) -> Result<f64, String> {
    above_zero(text, 1.0)
}

/// How many standard deviations up.
pub fn height(text: &str) -> Result<f64, String> {
    above_zero(text, 100.0)
}

/// A standard deviation of a logarithm.
pub fn spread(text: &str) -> Result<f64, String> {
    double(text)
        .filter(|x| (0.0..=5.0).contains(x))
        .ok_or_else(|| "a number from 0 to 5 is allowed".into())
}

fn above_zero(text: &str, high: f64) -> Result<f64, String> {
    double(text)
        .filter(|x| (1e-15..=high).contains(x))
        .ok_or_else(|| format!("a number from 1e-15 to {high} is allowed"))
}

fn double(text: &str) -> Option<f64> {
    text.parse().ok()
}

fn float(text: &str, low: f32, high: f32) -> Result<f32, String> {
    text.parse::<f32>()
        .ok()
        .filter(|x| (low..=high).contains(x))
        .ok_or_else(|| format!("a number from {low} to {high} is allowed"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes() {
        assert_eq!(size("512MiB"), Ok(512 << 20));
        assert_eq!(size("2 GiB"), Ok(2 << 30));
        assert_eq!(size("1000"), Ok(1000));
        for bad in [
            "",
            "0",
            "-1",
            "1.5GiB",
            "MiB",
            "1XB",
            "99999999999999999999",
            "99999999GiB",
        ] {
            assert!(size(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn whole_numbers_and_shares() {
        assert_eq!(whole::<1, 9>("9"), Ok(9));
        for bad in ["0", "10", "-1", "1.5", "", "x"] {
            assert!(whole::<1, 9>(bad).is_err(), "{bad}");
        }
        assert_eq!((gap("1e-9"), spread("0")), (Ok(1e-9), Ok(0.0)));
        for bad in ["0", "-1", "NaN", "inf", "1e-20", "1.1", ""] {
            assert!(gap(bad).is_err() && odds(bad).is_err(), "{bad}");
        }
        assert!(height("0").is_err() && spread("-1").is_err() && spread("6").is_err());
    }

    #[test]
    fn numbers_out_of_range_and_non_numbers_are_refused() {
        for bad in ["NaN", "inf", "-inf", "-1", "1e30", "", "x"] {
            assert!(temperature(bad).is_err(), "{bad}");
            assert!(top_p(bad).is_err() && fraction(bad).is_err(), "{bad}");
        }
        for bad in ["0", "-1e-6", "1.5", "NaN", "inf", "x"] {
            assert!(noise(bad).is_err(), "{bad}");
        }
        assert_eq!(noise("2e-6"), Ok(2e-6));
        assert!(top_p("0").is_err() && top_p("1").is_ok() && repetition("0").is_err());
        assert_eq!(bias("5:-2.5"), Ok((5, -2.5)));
        assert!(bias("5").is_err() && bias("x:1").is_err() && bias("5:NaN").is_err());
    }
}
