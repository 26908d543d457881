//! Instruction sets: which are here, and how one generic kernel is compiled for each.

use super::simd::{Portable, Simd};

/// A kernel path. Bits are equal on all of them; speed is not.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Isa {
    /// x86-64 with AVX-512 F, BW, DQ and VL.
    Avx512,
    /// x86-64 with AVX2, FMA and F16C.
    Avx2,
    /// aarch64 with NEON, which nearly all of them have.
    Neon,
    /// Plain Rust, on any target; slow where the target's baseline lacks a fused multiply-add.
    Portable,
}

/// A path this machine lacks was asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("this machine has no {}; it has {}", .0.name(), Isa::detect().name())]
pub struct IsaMissing(pub Isa);

impl Isa {
    /// Every path, fastest first.
    pub const ALL: [Isa; 4] = [Isa::Avx512, Isa::Avx2, Isa::Neon, Isa::Portable];

    /// As written on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Isa::Avx512 => "avx512",
            Isa::Avx2 => "avx2",
            Isa::Neon => "neon",
            Isa::Portable => "portable",
        }
    }

    /// The path called `name`.
    pub fn parse(name: &str) -> Option<Isa> {
        Isa::ALL.into_iter().find(|i| i.name() == name)
    }

    /// Whether this machine can run it.
    pub fn available(self) -> bool {
        match self {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => {
                is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
                    && Isa::Avx2.available()
            }
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => {
                is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("fma")
                    && is_x86_feature_detected!("f16c")
            }
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => std::arch::is_aarch64_feature_detected!("neon"),
            Isa::Portable => true,
            #[cfg(not(target_arch = "x86_64"))]
            Isa::Avx512 | Isa::Avx2 => false,
            #[cfg(not(target_arch = "aarch64"))]
            Isa::Neon => false,
        }
    }

    /// The fastest path this machine has.
    pub fn detect() -> Isa {
        let here = Isa::ALL.into_iter().find(|i| i.available());
        here.unwrap_or(Isa::Portable)
    }

    /// The forced path, or the fastest.
    pub fn choose(forced: Option<Isa>) -> Result<Isa, IsaMissing> {
        match forced {
            None => Ok(Isa::detect()),
            Some(isa) if isa.available() => Ok(isa),
            Some(isa) => Err(IsaMissing(isa)),
        }
    }

    /// Runs `kernel` compiled for this path.
    ///
    /// # Safety
    /// The path must be available here, and the kernel's own conditions must hold.
    #[inline]
    pub(crate) unsafe fn run<K: Kernel>(self, kernel: K) -> K::Out {
        // SAFETY: the caller vouches for both conditions.
        unsafe {
            match self {
                #[cfg(target_arch = "x86_64")]
                Isa::Avx512 => run_avx512(kernel),
                #[cfg(target_arch = "x86_64")]
                Isa::Avx2 => run_avx2(kernel),
                #[cfg(target_arch = "aarch64")]
                Isa::Neon => run_neon(kernel),
                _ => run_portable(kernel),
            }
        }
    }
}

/// A computation written once over [`Simd`]. `run` and all it calls must be `#[inline(always)]`, without closures: only
/// what is inlined into the entry points below is compiled with their instructions.
pub(crate) trait Kernel {
    /// Result.
    type Out;
    /// # Safety
    /// `S`'s instructions must be available; pointers inside must cover what the kernel documents.
    unsafe fn run<S: Simd>(self) -> Self::Out;
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn run_avx512<K: Kernel>(kernel: K) -> K::Out {
    // SAFETY: the features are enabled here.
    unsafe { kernel.run::<super::simd::Avx512>() }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn run_avx2<K: Kernel>(kernel: K) -> K::Out {
    // SAFETY: the features are enabled here.
    unsafe { kernel.run::<super::simd::Avx2>() }
}

#[cfg(target_arch = "aarch64")]
#[target_feature(enable = "neon")]
unsafe fn run_neon<K: Kernel>(kernel: K) -> K::Out {
    // SAFETY: the feature is enabled here.
    unsafe { kernel.run::<super::neon::Neon>() }
}

#[inline(never)]
unsafe fn run_portable<K: Kernel>(kernel: K) -> K::Out {
    // SAFETY: plain Rust needs no features.
    unsafe { kernel.run::<Portable>() }
}
