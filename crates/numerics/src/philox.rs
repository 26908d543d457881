//! Philox4x32-10, a counter-based generator: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.

const M: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
const W: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];

/// Ten rounds over `counter` under `key`.
#[inline]
pub fn philox4x32_10(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for round in 0..10 {
        if round > 0 {
            key[0] = key[0].wrapping_add(W[0]);
            key[1] = key[1].wrapping_add(W[1]);
        }
        let [a, b, c, d] = counter;
        let (p, q) = (
            u64::from(a) * u64::from(M[0]),
            u64::from(c) * u64::from(M[1]),
        );
        counter = [
            (q >> 32) as u32 ^ b ^ key[0],
            q as u32,
            (p >> 32) as u32 ^ d ^ key[1],
            p as u32,
        ];
    }
    counter
}

#[cfg(test)]
mod tests {
    use super::philox4x32_10;

    /// Known answers published with Random123.
    #[test]
    fn known_answers() {
        assert_eq!(
            philox4x32_10([0; 4], [0; 2]),
            [0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8]
        );
        assert_eq!(
            philox4x32_10([u32::MAX; 4], [u32::MAX; 2]),
            [0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd]
        );
        assert_eq!(
            philox4x32_10(
                [0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344],
                [0xa4093822, 0x299f31d0]
            ),
            [0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1]
        );
    }
}
