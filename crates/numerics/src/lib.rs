//! The numerics contract: the executable form of NUMERICS.md.
//!
//! Every operation here is a scalar reference, written for clarity. Kernels on every device are tested against it
//! bit for bit. Nothing in this crate does input or output, reads the environment or depends on the platform's libm.

pub mod attention;
pub mod chain;
pub mod digest;
pub mod ex2;
pub mod hopper;
pub mod k16;
pub mod lanes;
pub mod math;
pub mod norm;
pub mod philox;
pub mod rope;
pub mod sample;
pub mod select;
pub mod studies;
pub mod weight;

/// Version of NUMERICS.md that this crate implements. Bits may change only together with it.
pub const NUMERICS_VERSION: u32 = 1;

/// How many (id, logit) pairs a protected step reports.
pub const TOP_N: usize = 20;

/// Which arithmetic a model runs under.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Profile {
    /// Weights widened to f32, one ascending chain of f32 FMAs an output.
    IeeeF32,
    /// What a Hopper GPU's tensor cores compute: bf16 operands, one chain of k16 steps an output.
    HopperBf16,
}

impl Profile {
    /// Every profile.
    pub const ALL: [Profile; 2] = [Profile::IeeeF32, Profile::HopperBf16];

    /// The name used on the command line and in receipts.
    pub fn name(self) -> &'static str {
        match self {
            Profile::IeeeF32 => "ieee-f32",
            Profile::HopperBf16 => "hopper-bf16",
        }
    }

    /// The profile of that name.
    pub fn parse(name: &str) -> Option<Profile> {
        Profile::ALL.into_iter().find(|p| p.name() == name)
    }
}
