//! The kernels: sources, options and entry points. One file an operation, under `kernels/`.

/// What every kernel may include: name and text.
pub static HEADERS: &[(&str, &str)] = &[
    ("common.cuh", include_str!("../kernels/common.cuh")),
    ("k16.cuh", include_str!("../kernels/k16.cuh")),
    ("math.cuh", include_str!("../kernels/math.cuh")),
    ("hopper.cuh", include_str!("../kernels/hopper.cuh")),
    ("order.cuh", include_str!("../kernels/order.cuh")),
    ("row.cuh", include_str!("../kernels/row.cuh")),
    ("firsts.cuh", include_str!("../kernels/firsts.cuh")),
    ("choose.cuh", include_str!("../kernels/choose.cuh")),
    ("wgmma.cuh", include_str!("../kernels/wgmma.cuh")),
];

/// The compiler's options, beside architecture and definitions. Each number a kernel computes rounds where its source
/// says: nothing is contracted, reassociated, flushed or approximated.
pub const OPTIONS: &[&str] = &[
    "-fmad=false",
    "--ftz=false",
    "--prec-div=true",
    "--prec-sqrt=true",
    "--std=c++17",
    "--ptxas-options=-v",
];

/// A source compiled with one set of definitions.
#[derive(Debug)]
pub struct Unit {
    /// Its name, unique.
    pub name: &'static str,
    /// CUDA C++.
    pub source: &'static str,
    /// Definitions, such as `NT=2`.
    pub defines: &'static [&'static str],
    /// Speed matters: a spill is a bug.
    pub hot: bool,
    /// What it holds.
    pub kernels: &'static [Kernel],
}

/// An entry point.
#[derive(Debug)]
pub struct Kernel {
    /// What launches call it, unique among all units.
    pub name: &'static str,
    /// Its symbol in the unit.
    pub entry: &'static str,
    /// Dynamic shared memory it is launched with at most, bytes.
    pub dynamic: u32,
}

/// A line a unit: name, file, definitions, whether it is hot; then its kernels: name, entry point, dynamic shared memory.
macro_rules! units {
    ($($name:literal $file:literal [$($define:literal),*] $hot:ident { $($kernel:literal $entry:literal $dynamic:expr),+ })*) => {
        &[$(Unit {
            name: $name,
            source: include_str!(concat!("../kernels/", $file)),
            defines: &[$($define),*],
            hot: $hot,
            kernels: &[$(Kernel {
                name: $kernel,
                entry: $entry,
                dynamic: $dynamic,
            }),+],
        }),*]
    };
}

/// Dynamic shared memory of `linear_mma` for `nt` groups of eight tokens and `wn` warps, four boxes a stage.
pub const fn mma_shared(nt: u32, wn: u32) -> u32 {
    ring(4 * (16 * wn + 8 * nt) * 128, 212)
}

/// Dynamic shared memory of `linear_wg` for `wg` warpgroups, `tn` rows of the other side a tile and `bx` boxes a stage.
pub const fn wg_shared(wg: u32, tn: u32, bx: u32) -> u32 {
    ring(bx * (64 * wg + tn) * 128, 220)
}

/// Dynamic shared memory of `attention_prefill` for heads of `hd`, tiles of `kt` keys, `nc` warpgroups and `st` stages.
pub const fn prefill_shared(hd: u32, kt: u32, nc: u32, st: u32) -> u32 {
    1280 + nc * 64 * hd * 2 + 2 * st * kt * hd * 2 + nc * 64 * hd * 4
}

/// Dynamic shared memory of `attention_decode` for heads of `hd`, `gm` query heads a kv head and `bl` blocks a
/// multiprocessor.
pub const fn decode_shared(hd: u32, gm: u32, bl: u32) -> u32 {
    let tile = 128 * hd * 2;
    let stages = 196_608 / tile / bl;
    1024 + stages * tile + gm * 520 * 6 + gm * 4 * 4 + 16 * stages + 64
}

/// Room for alignment, as many stages as fit in so many KiB, and two barriers each.
const fn ring(stage: u32, kib: u32) -> u32 {
    let stages = kib * 1024 / stage;
    1024 + stages * stage + 16 * stages
}

/// Everything there is to compile.
pub static UNITS: &[Unit] = units! {
    "synthetic" "synthetic.cu" [] false { "synthetic" "synthetic" 0 }
    "add_bias" "add_bias.cu" [] false { "add_bias" "add_bias" 0 }
    "embed" "embed.cu" [] false { "embed" "embed" 0 }
    "norm" "norm.cu" [] false { "norm" "norm_rows" 0 }
    "logits" "logits.cu" [] true { "logits" "logits" crate::selection::Selection::SHARED }
    "firsts" "firsts.cu" [] true { "firsts" "firsts" 0 }
    "heads" "heads.cu" [] true { "heads" "heads" 0, "heads_many" "heads_many" 0 }
    "activation" "activation.cu" [] true { "activation" "activation" 0, "activation_table" "activation_table" 0, "activation_many" "activation_many" 128 << 10 }
    "proof" "proof.cu" [] false { "adverse" "adverse" 0, "differ" "differ" 0 }
    "linear_ref" "linear_ref.cu" [] false { "linear_ref" "linear_ref" 0 }
    "attention_ref" "attention_ref.cu" [] false { "attention_ref" "attention_ref" 0 }
    "linear_mma_8_32" "linear_mma.cu" ["NT=1", "WN=2"] true { "linear_mma_8_32" "linear_mma" mma_shared(1, 2) }
    "linear_mma_8_48" "linear_mma.cu" ["NT=1", "WN=3"] true { "linear_mma_8_48" "linear_mma" mma_shared(1, 3) }
    "linear_mma_8_64" "linear_mma.cu" ["NT=1", "WN=4"] true { "linear_mma_8_64" "linear_mma" mma_shared(1, 4) }
    "linear_mma_16_32" "linear_mma.cu" ["NT=2", "WN=2"] true { "linear_mma_16_32" "linear_mma" mma_shared(2, 2) }
    "linear_mma_16_48" "linear_mma.cu" ["NT=2", "WN=3"] true { "linear_mma_16_48" "linear_mma" mma_shared(2, 3) }
    "linear_mma_16_64" "linear_mma.cu" ["NT=2", "WN=4"] true { "linear_mma_16_64" "linear_mma" mma_shared(2, 4) }
    "linear_mma_32_32" "linear_mma.cu" ["NT=4", "WN=2"] true { "linear_mma_32_32" "linear_mma" mma_shared(4, 2) }
    "linear_mma_32_48" "linear_mma.cu" ["NT=4", "WN=3"] true { "linear_mma_32_48" "linear_mma" mma_shared(4, 3) }
    "linear_mma_32_64" "linear_mma.cu" ["NT=4", "WN=4"] true { "linear_mma_32_64" "linear_mma" mma_shared(4, 4) }
    "linear_gated_8" "linear_mma.cu" ["NT=1", "WN=4", "GATED=1"] true { "linear_gated_8" "linear_mma" mma_shared(1, 4) }
    "linear_gated_16" "linear_mma.cu" ["NT=2", "WN=4", "GATED=1"] true { "linear_gated_16" "linear_mma" mma_shared(2, 4) }
    "linear_gated_32" "linear_mma.cu" ["NT=4", "WN=4", "GATED=1"] true { "linear_gated_32" "linear_mma" mma_shared(4, 4) }
    "linear_wg_64" "linear_wg.cu" ["WG=1", "TN=64", "BX=2"] true { "linear_wg_64" "linear_wg" wg_shared(1, 64, 2) }
    "linear_wg_128" "linear_wg.cu" ["WG=1", "TN=128", "BX=2"] true { "linear_wg_128" "linear_wg" wg_shared(1, 128, 2) }
    "linear_wg_256" "linear_wg.cu" ["WG=2", "TN=256", "BX=1"] true { "linear_wg_256" "linear_wg" wg_shared(2, 256, 1) }
    "linear_turned_32" "linear_wg.cu" ["TURNED=1", "WG=1", "TN=32", "BX=2"] true { "linear_turned_32" "linear_wg" wg_shared(1, 32, 2) }
    "linear_turned_40" "linear_wg.cu" ["TURNED=1", "WG=1", "TN=40", "BX=2"] true { "linear_turned_40" "linear_wg" wg_shared(1, 40, 2) }
    "linear_turned_48" "linear_wg.cu" ["TURNED=1", "WG=1", "TN=48", "BX=2"] true { "linear_turned_48" "linear_wg" wg_shared(1, 48, 2) }
    "linear_turned_80" "linear_wg.cu" ["TURNED=1", "WG=1", "TN=80", "BX=2"] true { "linear_turned_80" "linear_wg" wg_shared(1, 80, 2) }
    "linear_turned_112" "linear_wg.cu" ["TURNED=1", "WG=1", "TN=112", "BX=2"] true { "linear_turned_112" "linear_wg" wg_shared(1, 112, 2) }
    "linear_head_32" "linear_wg.cu" ["HEAD=1", "WG=2", "TN=32", "BX=2"] true { "linear_head_32" "linear_wg" wg_shared(2, 32, 2) }
    "linear_head_64" "linear_wg.cu" ["HEAD=1", "WG=2", "TN=64", "BX=2"] true { "linear_head_64" "linear_wg" wg_shared(2, 64, 2) }
    "linear_head_128" "linear_wg.cu" ["HEAD=1", "WG=2", "TN=128", "BX=1"] true { "linear_head_128" "linear_wg" wg_shared(2, 128, 1) }
    "attention_prefill_64" "attention_prefill.cu" ["HD=64", "KT=128", "NC=2", "ST=2"] true { "attention_prefill_64" "attention_prefill" prefill_shared(64, 128, 2, 2) }
    "attention_prefill_128" "attention_prefill.cu" ["HD=128", "KT=128", "NC=2", "ST=2"] true { "attention_prefill_128" "attention_prefill" prefill_shared(128, 128, 2, 2) }
    "attention_prefill_256" "attention_prefill.cu" ["HD=256", "KT=64", "NC=1", "ST=2"] true { "attention_prefill_256" "attention_prefill" prefill_shared(256, 64, 1, 2) }
    "attention_prefill_window_64" "attention_prefill.cu" ["WIN=1", "HD=64", "KT=128", "NC=2", "ST=2"] true { "attention_prefill_window_64" "attention_prefill" prefill_shared(64, 128, 2, 2) }
    "attention_prefill_window_128" "attention_prefill.cu" ["WIN=1", "HD=128", "KT=128", "NC=2", "ST=2"] true { "attention_prefill_window_128" "attention_prefill" prefill_shared(128, 128, 2, 2) }
    "attention_prefill_window_256" "attention_prefill.cu" ["WIN=1", "HD=256", "KT=64", "NC=1", "ST=2"] true { "attention_prefill_window_256" "attention_prefill" prefill_shared(256, 64, 1, 2) }
    "attention_whole_64" "attention_prefill.cu" ["HD=64", "KT=128", "NC=2", "ST=2", "CH=1<<30"] true { "attention_whole_64" "attention_prefill" prefill_shared(64, 128, 2, 2) }
    "attention_whole_128" "attention_prefill.cu" ["HD=128", "KT=128", "NC=2", "ST=2", "CH=1<<30"] true { "attention_whole_128" "attention_prefill" prefill_shared(128, 128, 2, 2) }
    "attention_whole_256" "attention_prefill.cu" ["HD=256", "KT=64", "NC=1", "ST=2", "CH=1<<30"] true { "attention_whole_256" "attention_prefill" prefill_shared(256, 64, 1, 2) }
    "attention_decode_64" "attention_decode.cu" ["HD=64"] true { "attention_decode_64" "attention_decode" decode_shared(64, 4, 2) }
    "attention_decode_128" "attention_decode.cu" ["HD=128"] true { "attention_decode_128" "attention_decode" decode_shared(128, 4, 2) }
    "attention_decode_wide_64" "attention_decode.cu" ["HD=64", "GM=8", "BL=1"] true { "attention_decode_wide_64" "attention_decode" decode_shared(64, 8, 1) }
    "attention_decode_wide_128" "attention_decode.cu" ["HD=128", "GM=8", "BL=1"] true { "attention_decode_wide_128" "attention_decode" decode_shared(128, 8, 1) }
};

/// The unit of that name.
pub fn unit(name: &str) -> Option<&'static Unit> {
    UNITS.iter().find(|u| u.name == name)
}

/// All options of a unit for an architecture such as `sm_90a`.
pub fn options(unit: &Unit, arch: &str) -> Vec<String> {
    let mut all = vec![format!("--gpu-architecture={arch}")];
    all.extend(OPTIONS.iter().map(|o| o.to_string()));
    all.extend(unit.defines.iter().map(|d| format!("-D{d}")));
    all
}

#[cfg(test)]
mod tests;
