//! Digests of results as they were when this numerics version was written. A change here is a change of the contract:
//! of our code, of the `libm` crate, or of the compiler's idea of f32.

use crate::{Numbers, bits};
use half::bf16;
use numerics::{
    attention,
    digest::Encoder,
    hopper, math,
    rope::{self, RopeScaling},
};

fn digest(values: &[f32]) -> String {
    Encoder::new("test golden")
        .u32s("bits", bits(values))
        .finish()
        .short()
}

#[test]
fn elementary_functions() {
    let of = |f: fn(f32) -> f32| {
        let arguments = (0..u32::MAX).step_by(65_521).map(f32::from_bits);
        digest(&arguments.map(f).collect::<Vec<_>>())
    };
    let now = [
        ("exp2", of(math::exp2)),
        ("exp", of(math::exp)),
        ("ln", of(math::ln)),
        ("tanh", of(math::tanh)),
        ("silu", of(math::silu)),
        ("gelu_tanh", of(math::gelu_tanh)),
    ];
    let then = [
        ("exp2", "1ed5c2ca40db"),
        ("exp", "f5c2f4d5d153"),
        ("ln", "6e3478176157"),
        ("tanh", "96f90b9e338b"),
        ("silu", "fd2590870516"),
        ("gelu_tanh", "68496096d51b"),
    ];
    assert_eq!(now.each_ref().map(|(name, d)| (*name, d.as_str())), then);
}

#[test]
fn rotary_tables() {
    let of = |d, theta, scaling| {
        let inv = rope::inverse_frequencies(d, theta, scaling);
        let (mut table, sin) = rope::angle_table(2000, &inv);
        table.extend(sin);
        digest(&table)
    };
    let llama3 = RopeScaling::Llama3 {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_context: 8192,
    };
    let now = [
        of(64, 10_000.0, RopeScaling::None),
        of(128, 500_000.0, llama3),
        of(256, 1_000_000.0, RopeScaling::Linear { factor: 8.0 }),
    ];
    assert_eq!(now, ["15e936efe3f2", "0bf8f33e7974", "f015f37646e4"]);
}

#[test]
fn attention_over_chunks() {
    let mut n = Numbers(31);
    let rows: Vec<Vec<f32>> = (0..1200).map(|_| n.units(16)).collect();
    let halves: Vec<Vec<bf16>> = rows.iter().map(|r| hopper::round_row(r)).collect();
    let (mut out, mut half_out) = ([0.0; 16], [bf16::ZERO; 16]);
    let (mut all, mut half_all) = (Vec::new(), Vec::new());
    for (lo, hi) in [(0, 1), (0, 64), (3, 257), (0, 600), (100, 599)] {
        let (keys, values) = (|j: usize| &rows[j][..], |j: usize| &rows[600 + j][..]);
        attention::attend(&rows[0], keys, values, lo, hi, 3.0, &mut out);
        all.extend(out);
        let (keys, values) = (|j: usize| &halves[j][..], |j: usize| &halves[600 + j][..]);
        hopper::attend(&halves[0], keys, values, lo, hi, 3.0, &mut half_out);
        half_all.extend(half_out.map(|x| x.to_f32()));
    }
    let now = [digest(&all), digest(&half_all)];
    assert_eq!(now, ["a792200e9f3d", "d7ac43f80909"]);
}

#[test]
fn rows_of_hopper_bf16() {
    let mut n = Numbers(32);
    let mut all = Vec::new();
    for len in [64, 96, 1024, 1032, 2560] {
        let (x, w) = (n.units(len), n.units(len));
        let x: Vec<f32> = hopper::round_row(&x).iter().map(|x| x.to_f32()).collect();
        let mut y = vec![0.0; len];
        hopper::rms_norm(&x, &w, 1e-6, &mut y);
        all.extend(y);
    }
    for act in [math::silu, math::gelu_tanh] {
        for bits in 0..=u16::MAX {
            let y = hopper::gated(act, bf16::from_bits(bits), bf16::ONE);
            all.push(y.to_f32());
        }
    }
    assert_eq!(digest(&all), "b39d559466ae");
}
