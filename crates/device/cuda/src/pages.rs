//! The image of keys and values in memory, as `kernels/common.cuh` describes it.

use half::bf16;

/// Tokens a page holds.
pub const TOKENS: usize = 64;

/// Bytes of one page: 64 tokens of one head, K or V.
pub const fn bytes(head_dim: usize) -> usize {
    head_dim.div_ceil(64) * 8192
}

/// Byte of an element inside a page.
pub const fn at(token: usize, dim: usize) -> usize {
    (dim / 64) * 8192 + token * 128 + (((dim / 8) % 8) ^ (token % 8)) * 16 + (dim % 8) * 2
}

/// Byte at which a page of the pool begins: blocks of `[K, V][kv heads]` pages.
pub const fn start(
    block: usize,
    value: bool,
    head: usize,
    kv_heads: usize,
    head_dim: usize,
) -> usize {
    ((block * 2 + value as usize) * kv_heads + head) * bytes(head_dim)
}

/// Writes one head of one token.
pub fn put(pool: &mut [u8], page: usize, token: usize, head: &[bf16]) {
    // Eight elements lie together.
    for (i, eight) in head.chunks(8).enumerate() {
        let at = page + at(token, 8 * i);
        for (place, x) in pool[at..].chunks_exact_mut(2).zip(eight) {
            place.copy_from_slice(&x.to_le_bytes());
        }
    }
}

/// Reads one head of one token.
pub fn get(pool: &[u8], page: usize, token: usize, head_dim: usize) -> Vec<bf16> {
    (0..head_dim)
        .map(|dim| {
            let at = page + at(token, dim);
            bf16::from_le_bytes([pool[at], pool[at + 1]])
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_holds_every_element_once() {
        for d in [8, 64, 96, 128, 256] {
            let mut seen = vec![false; bytes(d)];
            for token in 0..TOKENS {
                for dim in 0..d {
                    let at = at(token, dim);
                    assert!(at.is_multiple_of(2) && !seen[at]);
                    seen[at] = true;
                }
            }
        }
        assert_eq!(start(3, true, 1, 4, 128), ((3 * 2 + 1) * 4 + 1) * 16384);
    }
}
