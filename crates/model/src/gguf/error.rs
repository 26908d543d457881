//! Why a GGUF file was refused.

use std::fmt;

/// Text from a file as it may appear in a message: control characters escaped, cut after 80 characters.
pub(crate) fn shown(s: &str) -> String {
    match s.char_indices().nth(80) {
        Some((end, _)) => one_line(&s[..end]) + "…",
        None => one_line(s),
    }
}

/// Text with its control characters escaped.
pub(crate) fn one_line(s: &str) -> String {
    let mut out = String::new();
    for c in s.chars() {
        match c {
            '"' | '\'' => out.push(c),
            _ => out.extend(c.escape_debug()),
        }
    }
    out
}

/// Why a GGUF file could not be read. Every message is one line and says what, where, the value given and what is
/// allowed.
#[derive(Debug, thiserror::Error)]
pub enum GgufError {
    /// The operating system refused.
    #[error("cannot read the file: {0}")]
    Io(#[from] std::io::Error),
    /// The first four bytes are not `GGUF`.
    #[error("not a GGUF file: it starts with {given}, allowed: \"GGUF\"")]
    Magic {
        /// What the file starts with.
        given: String,
    },
    /// A version this reader does not know.
    #[error("GGUF version {given} at byte 4 is not supported, allowed: 2 and 3, little-endian")]
    Version {
        /// The version field.
        given: u32,
    },
    /// A field, or what a count promises, reaches past the end of the file.
    #[error("{what} at byte {at} takes {needed} bytes, but the file has only {left} left")]
    Truncated {
        /// The field.
        what: String,
        /// Where it starts.
        at: usize,
        /// Bytes it takes at least.
        needed: u128,
        /// Bytes there are.
        left: usize,
    },
    /// A field holds a value outside what the format allows.
    #[error("{what} at byte {at} is {given}, allowed: {allowed}")]
    Field {
        /// The field.
        what: String,
        /// Where it starts.
        at: usize,
        /// The value given.
        given: String,
        /// What is allowed.
        allowed: String,
    },
    /// A name that must be unique is not.
    #[error("{what} \"{name}\" at byte {at} appears twice, allowed: once")]
    Duplicate {
        /// `key` or `tensor`.
        what: &'static str,
        /// The name.
        name: String,
        /// Where the second one starts.
        at: usize,
    },
    /// A metadata key is needed and absent.
    #[error("metadata key \"{key}\" is missing")]
    MissingKey {
        /// The key.
        key: String,
    },
    /// A metadata key holds the wrong type or a value outside its range.
    #[error("metadata key \"{key}\" is {given}, allowed: {allowed}")]
    Key {
        /// The key.
        key: String,
        /// What it holds.
        given: String,
        /// What is allowed.
        allowed: String,
    },
    /// A tensor's description is impossible or not supported.
    #[error("tensor \"{name}\": {what} is {given}, allowed: {allowed}")]
    Tensor {
        /// The tensor.
        name: String,
        /// Which property.
        what: &'static str,
        /// The value given.
        given: String,
        /// What is allowed.
        allowed: String,
    },
}

impl GgufError {
    pub(crate) fn key(key: &str, given: impl fmt::Display, allowed: impl fmt::Display) -> Self {
        GgufError::Key {
            key: shown(key),
            given: given.to_string(),
            allowed: allowed.to_string(),
        }
    }

    pub(crate) fn tensor(
        name: &str,
        what: &'static str,
        given: impl fmt::Display,
        allowed: impl fmt::Display,
    ) -> Self {
        GgufError::Tensor {
            name: shown(name),
            what,
            given: given.to_string(),
            allowed: allowed.to_string(),
        }
    }
}
