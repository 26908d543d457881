//! Keys of the prefix cache: a BLAKE3 chain over everything that decides a block's KV bits.

use device::{BLOCK_TOKENS, KernelFamily};
use numerics::Profile;

/// Names one full block of KV: its 64 token ids, all tokens before them, and what wrote them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ChainKey([u8; 32]);

/// What wrote a block's KV. Blocks are shared only under equal provenance, so that an `invariant` request never reads
/// what a vendor kernel wrote, nor the other way round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Provenance {
    /// Kernel family.
    pub family: KernelFamily,
    /// Geometry class: protections whose launches may differ in bits differ here.
    pub class: &'static str,
}

impl ChainKey {
    /// The key before the first block of a sequence.
    pub fn root(profile: Profile, provenance: Provenance, salt: Option<&str>) -> Self {
        let family: &[u8] = match provenance.family {
            KernelFamily::Contract => b"contract",
            KernelFamily::Vendor => b"vendor",
        };
        let mut hasher = blake3::Hasher::new_derive_key("blocklock 1 prefix cache root");
        for field in [
            profile.name().as_bytes(),
            family,
            provenance.class.as_bytes(),
            if salt.is_some() { b"salted" } else { b"plain" },
            salt.unwrap_or("").as_bytes(),
        ] {
            hasher.update(&(field.len() as u64).to_le_bytes());
            hasher.update(field);
        }
        Self(*hasher.finalize().as_bytes())
    }

    /// The key of the block that follows `self` and holds `tokens`.
    pub fn extend(&self, tokens: &[u32]) -> Self {
        debug_assert_eq!(tokens.len(), BLOCK_TOKENS);
        let mut bytes = [0u8; 4 * BLOCK_TOKENS];
        for (to, token) in bytes.chunks_exact_mut(4).zip(tokens) {
            to.copy_from_slice(&token.to_le_bytes());
        }
        let mut hasher = blake3::Hasher::new_derive_key("blocklock 1 prefix cache block");
        hasher.update(&self.0);
        hasher.update(&bytes);
        Self(*hasher.finalize().as_bytes())
    }
}
