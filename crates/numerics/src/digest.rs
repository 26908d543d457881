//! BLAKE3 digests over a canonical encoding (NUMERICS.md section 12).

use std::{fmt, str::FromStr};

/// 32 bytes of BLAKE3, shown and parsed as 64 lower-case hexadecimal digits.
#[derive(
    Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize,
)]
#[serde(into = "String", try_from = "String")]
pub struct Digest(pub [u8; 32]);

impl Digest {
    /// The first 12 hexadecimal digits, for people.
    pub fn short(&self) -> String {
        self.to_string()[..12].into()
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|b| write!(f, "{b:02x}"))
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Text that is no digest.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("a digest is 64 lower-case hexadecimal digits, not {0:?}")]
pub struct BadDigest(pub String);

impl FromStr for Digest {
    type Err = BadDigest;

    fn from_str(s: &str) -> Result<Self, BadDigest> {
        let digit = |b: u8| match b {
            b'0'..=b'9' => Some(b - b'0'),
            b'a'..=b'f' => Some(b - b'a' + 10),
            _ => None,
        };
        let bytes = s.as_bytes();
        let mut out = [0; 32];
        if bytes.len() != 64 {
            return Err(BadDigest(s.into()));
        }
        for (o, pair) in out.iter_mut().zip(bytes.chunks_exact(2)) {
            match (digit(pair[0]), digit(pair[1])) {
                (Some(h), Some(l)) => *o = h << 4 | l,
                _ => return Err(BadDigest(s.into())),
            }
        }
        Ok(Self(out))
    }
}

impl From<Digest> for String {
    fn from(d: Digest) -> String {
        d.to_string()
    }
}

impl TryFrom<String> for Digest {
    type Error = BadDigest;

    fn try_from(s: String) -> Result<Self, BadDigest> {
        s.parse()
    }
}

/// Hashes named fields in the order given. Each is the name's length (u32), the name, the value's length (u64), the
/// value; all little-endian. The domain string is BLAKE3's key-derivation context.
pub struct Encoder(blake3::Hasher);

impl Encoder {
    /// Starts an encoding for one purpose, which `domain` names for ever.
    pub fn new(domain: &'static str) -> Self {
        Self(blake3::Hasher::new_derive_key(domain))
    }

    /// A field of bytes.
    pub fn bytes(&mut self, name: &str, value: &[u8]) -> &mut Self {
        self.0.update(&(name.len() as u32).to_le_bytes());
        self.0.update(name.as_bytes());
        self.0.update(&(value.len() as u64).to_le_bytes());
        self.0.update(value);
        self
    }

    /// A field of UTF-8 text.
    pub fn text(&mut self, name: &str, value: &str) -> &mut Self {
        self.bytes(name, value.as_bytes())
    }

    /// A field of 4 bytes.
    pub fn u32(&mut self, name: &str, value: u32) -> &mut Self {
        self.bytes(name, &value.to_le_bytes())
    }

    /// A field of 8 bytes.
    pub fn u64(&mut self, name: &str, value: u64) -> &mut Self {
        self.bytes(name, &value.to_le_bytes())
    }

    /// A field of the f32's bits.
    pub fn f32(&mut self, name: &str, value: f32) -> &mut Self {
        self.u32(name, value.to_bits())
    }

    /// A field of the f64's bits.
    pub fn f64(&mut self, name: &str, value: f64) -> &mut Self {
        self.u64(name, value.to_bits())
    }

    /// A field of 4 bytes an element.
    pub fn u32s(&mut self, name: &str, values: impl IntoIterator<Item = u32>) -> &mut Self {
        let bytes: Vec<u8> = values.into_iter().flat_map(u32::to_le_bytes).collect();
        self.bytes(name, &bytes)
    }

    /// A field of another digest's 32 bytes.
    pub fn digest(&mut self, name: &str, value: &Digest) -> &mut Self {
        self.bytes(name, &value.0)
    }

    /// The digest of all fields.
    pub fn finish(&self) -> Digest {
        Digest(*self.0.finalize().as_bytes())
    }
}

/// Digest of one step: its token, and the ids and logit bits of its Top-20 in their order.
pub fn step_digest(token: u32, top: &[(u32, f32)]) -> Digest {
    Encoder::new("blocklock step v1")
        .u32("token", token)
        .u32s("ids", top.iter().map(|t| t.0))
        .u32s("bits", top.iter().map(|t| t.1.to_bits()))
        .finish()
}
