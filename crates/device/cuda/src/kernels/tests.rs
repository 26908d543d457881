//! No kernel holds what would round elsewhere than its source says; each waits, compiles and does not spill.

use super::*;
use crate::{Cache, Nvrtc, cache::ARCH};

#[test]
fn options_are_exactly_these() {
    let all = options(unit("linear_mma_16_48").unwrap(), ARCH);
    let want = [
        "--gpu-architecture=sm_90a",
        "-fmad=false",
        "--ftz=false",
        "--prec-div=true",
        "--prec-sqrt=true",
        "--std=c++17",
        "--ptxas-options=-v",
        "-DNT=2",
        "-DWN=3",
    ];
    assert_eq!(all, want);
}

/// Words that would let the compiler or the hardware round elsewhere than the source says.
const FORBIDDEN: [&str; 31] = [
    "use_fast_math",
    "__fdividef",
    "__expf",
    "__exp10f",
    "__logf",
    "__log2f",
    "__log10f",
    "__powf",
    "__sinf",
    "__cosf",
    "__tanf",
    "__sincosf",
    "__saturatef",
    "__frsqrt",
    "rsqrt",
    ".approx",
    "rcp.",
    "expf(",
    "exp2f(",
    "logf(",
    "powf(",
    "tanhf(",
    "sqrtf(",
    "sinf(",
    "cosf(",
    "atomicAdd",
    "red.global",
    "__fadd_rz",
    "__fmul_rz",
    "__fmaf_rz",
    "#include <",
];

#[test]
fn no_source_holds_fast_math_or_float_atomics() {
    let sources = UNITS.iter().map(|u| (u.name, u.source));
    for (name, source) in sources.chain(HEADERS.iter().copied()) {
        let allowed = source.matches("ex2.approx.ftz.f32").count();
        for word in FORBIDDEN {
            let mut found = source.matches(word).count();
            if word == ".approx" {
                // The contract's own exponential, in one place.
                assert!(allowed == usize::from(name == "common.cuh"), "{name}");
                found -= allowed;
            }
            assert_eq!(found, 0, "{name} contains {word}");
        }
        // A plain division compiles to the right one only by an option; say it in the source.
        let code: Vec<&str> = source
            .lines()
            .map(|l| l.split("//").next().unwrap())
            .collect();
        for line in code {
            assert!(
                !line.contains("1.f/") && !line.contains("1.f /"),
                "{name}: {line}"
            );
        }
    }
}

/// A kernel that starts early and does not wait would read what is not there yet.
#[test]
fn every_kernel_waits_for_the_one_before() {
    for unit in UNITS {
        let entries = unit.source.matches("extern \"C\" __global__").count();
        assert_eq!(entries, unit.kernels.len(), "{}", unit.name);
        let starts = unit.source.matches("let_next_start();").count();
        let waits = unit.source.matches("wait_for_previous();").count();
        assert!(starts == entries && waits >= entries, "{}", unit.name);
    }
}

#[test]
fn names_are_unique_and_entries_exist() {
    let mut seen = std::collections::HashSet::new();
    for unit in UNITS {
        for kernel in unit.kernels {
            assert!(seen.insert(kernel.name), "{}", kernel.name);
            assert!(
                unit.source.contains(&format!(" {}(", kernel.entry)),
                "{}",
                kernel.name
            );
            assert!(kernel.dynamic <= 227 << 10, "{}", kernel.name);
        }
    }
}

#[test]
fn every_kernel_compiles_and_no_hot_one_spills() {
    let nvrtc = match Nvrtc::find() {
        Ok(nvrtc) => nvrtc,
        Err(error) => {
            println!("not run: kernels (no NVRTC: {error})");
            return;
        }
    };
    println!("{nvrtc:?}");
    let all = Cache::new(None).build_all(&nvrtc, ARCH).unwrap();
    for (unit, built) in UNITS.iter().zip(all) {
        assert_eq!(unit.name, built.name);
        assert_eq!(built.resources.len(), unit.kernels.len(), "{}", unit.name);
        for r in built.resources {
            println!(
                "{:<28} {:>4} registers {:>4} bytes spilled {:>6} bytes shared",
                unit.name, r.registers, r.spills, r.shared
            );
            assert!(
                unit.kernels.iter().any(|k| k.entry == r.entry),
                "{}",
                r.entry
            );
            assert!(
                !unit.hot || r.spills == 0,
                "{} spills {} bytes",
                unit.name,
                r.spills
            );
        }
    }
}
