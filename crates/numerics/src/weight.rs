//! Stored weight formats and the exact widening of each to f32.

/// How a weight tensor is stored. Quantised formats are GGUF's blocks along K (the input dimension).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum WeightType {
    F32,
    F16,
    Bf16,
    Q8_0,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q4K,
    Q5K,
    Q6K,
}

impl WeightType {
    /// Elements a block (1 for plain formats).
    pub fn block_len(self) -> usize {
        use WeightType::*;
        match self {
            F32 | F16 | Bf16 => 1,
            Q8_0 | Q4_0 | Q4_1 | Q5_0 | Q5_1 => 32,
            Q4K | Q5K | Q6K => 256,
        }
    }

    /// Bytes a block.
    pub fn block_bytes(self) -> usize {
        use WeightType::*;
        match self {
            F32 => 4,
            F16 | Bf16 => 2,
            Q8_0 => 34,
            Q4_0 => 18,
            Q4_1 => 20,
            Q5_0 => 22,
            Q5_1 => 24,
            Q4K => 144,
            Q5K => 176,
            Q6K => 210,
        }
    }

    /// Bytes one row of `cols` elements takes; `None` where `cols` is not a whole number of blocks.
    pub fn row_bytes(self, cols: usize) -> Option<usize> {
        if cols % self.block_len() != 0 {
            return None;
        }
        (cols / self.block_len()).checked_mul(self.block_bytes())
    }

    /// GGUF's name of the format.
    pub fn name(self) -> &'static str {
        use WeightType::*;
        match self {
            F32 => "F32",
            F16 => "F16",
            Bf16 => "BF16",
            Q8_0 => "Q8_0",
            Q4_0 => "Q4_0",
            Q4_1 => "Q4_1",
            Q5_0 => "Q5_0",
            Q5_1 => "Q5_1",
            Q4K => "Q4_K",
            Q5K => "Q5_K",
            Q6K => "Q6_K",
        }
    }
}
