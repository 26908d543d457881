//! Kernels against `numerics`, bit for bit, on every path this machine has.

use super::isa::{Isa, Kernel};
use super::linear::{Direct, MAX_TB, PANEL, Panel, SLICE, blocking, direct};
use super::memory::Floats;
use super::pack::Packed;
use super::rows::{Canonical, ExpSum, Norm, Residual, Rotate, Top};
use super::simd::{LANES, Simd};
use super::{CpuDevice, CpuOptions, math};
use crate::testing::{Rng, WEIGHT_TYPES, build, smollm2, tensor};
use model::Tensor;
use numerics::weight::{WeightType, widen_row};

mod attention;
mod disturb;
mod simd;
mod team;

/// The paths to test; says which can't be.
fn paths() -> Vec<Isa> {
    let (here, missing): (Vec<Isa>, Vec<Isa>) = Isa::ALL.into_iter().partition(|i| i.available());
    for isa in missing {
        println!("not run: this machine has no {}", isa.name());
    }
    here
}

fn same(a: f32, b: f32) -> bool {
    a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan())
}

fn assert_same(got: &[f32], want: &[f32], what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (i, (&g, &w)) in got.iter().zip(want).enumerate() {
        assert!(
            same(g, w),
            "{what}: element {i} is {g:e} ({:#x}), not {w:e} ({:#x})",
            g.to_bits(),
            w.to_bits()
        );
    }
}

#[derive(Clone, Copy)]
enum Function {
    Exp,
    Tanh,
    Silu,
    Gelu,
    Exp2Frac,
}

struct Map<'a>(Function, &'a [f32], &'a mut [f32]);

impl Kernel for Map<'_> {
    type Out = ();
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        for i in (0..self.1.len()).step_by(LANES) {
            // SAFETY: lengths are multiples of 16.
            unsafe {
                let x = S::load(self.1.as_ptr().add(i));
                let y = match self.0 {
                    Function::Exp => math::exp::<S>(x),
                    Function::Tanh => math::tanh::<S>(x),
                    Function::Silu => math::silu::<S>(x),
                    Function::Gelu => math::gelu_tanh::<S>(x),
                    Function::Exp2Frac => math::exp2frac::<S>(x),
                };
                S::store(self.2.as_mut_ptr().add(i), y);
            }
        }
    }
}

#[test]
fn elementary_functions_equal_the_contract() {
    let mut rng = Rng(1);
    let mut x: Vec<f32> = (0..60_000)
        .map(|i| match i % 3 {
            0 => f32::from_bits(rng.bits() as u32),
            1 => rng.unit() * 100.0,
            _ => rng.unit() * 2.0,
        })
        .collect();
    x.extend([
        0.0,
        -0.0,
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::NAN,
        1e-45,
        -1e-45,
        0.55,
        88.8,
        -103.9,
    ]);
    x.resize(x.len().next_multiple_of(LANES), 0.5);
    let small: Vec<f32> = x.iter().map(|_| rng.unit() * 0.5).collect();
    use numerics::math as m;
    for isa in paths() {
        type Case<'a> = (Function, fn(f32) -> f32, &'a [f32]);
        let cases: [Case; 5] = [
            (Function::Exp, m::exp, &x),
            (Function::Tanh, m::tanh, &x),
            (Function::Silu, m::silu, &x),
            (Function::Gelu, m::gelu_tanh, &x),
            (Function::Exp2Frac, m::exp2frac, &small),
        ];
        for (i, (f, scalar, x)) in cases.into_iter().enumerate() {
            let mut y = vec![0.0; x.len()];
            // SAFETY: the path is available; lengths are equal multiples of 16.
            unsafe { isa.run(Map(f, x, &mut y)) };
            let want: Vec<f32> = x.iter().map(|&x| scalar(x)).collect();
            assert_same(&y, &want, &format!("function {i} on {}", isa.name()));
        }
    }
}

/// `[block][k][tb]` of row-major rows.
fn interleave(x: &[Vec<f32>], tb: usize) -> Floats {
    let k = x[0].len();
    let mut out = Floats::zeroed(x.len().div_ceil(tb) * tb * k);
    for (t, row) in x.iter().enumerate() {
        for (i, &v) in row.iter().enumerate() {
            // SAFETY: within the buffer.
            unsafe { *out.ptr().at((t / tb * k + i) * tb + t % tb) = v };
        }
    }
    out
}

fn product(isa: Isa, w: &Packed, x: &[Vec<f32>]) -> Vec<Vec<f32>> {
    let (tb, blocks) = blocking(x.len());
    let stride = w.units * LANES;
    let mut packed = interleave(x, tb);
    let mut y = Floats::zeroed(tb * blocks * stride);
    let mut buffer = Floats::zeroed(SLICE * PANEL);
    let (xp, yp) = (packed.ptr().0, y.ptr());
    // SAFETY: buffers have the sizes the kernels ask for.
    unsafe {
        if direct(isa, w.form, x.len()) {
            isa.run(Direct {
                w,
                from: 0,
                to: w.units,
                x: xp,
                tokens: tb,
                y: yp.0,
                stride,
            });
        } else {
            for unit in (0..w.units).step_by(2) {
                isa.run(Panel {
                    w,
                    unit,
                    x: xp,
                    tb,
                    blocks,
                    y: yp.at(unit * LANES),
                    stride,
                    buffer: buffer.ptr().0,
                });
            }
        }
        (0..x.len())
            .map(|t| yp.slice(t * stride, stride).to_vec())
            .collect()
    }
}

fn check_product(isa: Isa, t: &Tensor, x: &[Vec<f32>], what: &str) {
    let y = product(isa, &Packed::new(t), x);
    let mut w = vec![0.0; t.cols];
    for n in 0..t.rows {
        widen_row(t.dtype, t.row(n), &mut w);
        for (i, row) in x.iter().enumerate() {
            let want = numerics::chain::dot(row, &w);
            assert!(
                same(y[i][n], want),
                "{what} on {}: token {i} of {}, output {n}: {:e} instead of {want:e}",
                isa.name(),
                x.len(),
                y[i][n]
            );
        }
    }
}

#[test]
fn products_are_chains_for_every_format_and_token_count() {
    let mut rng = Rng(2);
    for isa in paths() {
        for dtype in WEIGHT_TYPES {
            for (rows, cols) in [
                (1, 1),
                (15, 7),
                (16, 32),
                (33, 50),
                (70, 256),
                (48, 544),
                (97, 1280),
            ] {
                if dtype.row_bytes(cols).is_none() {
                    continue;
                }
                let t = tensor(&mut rng, dtype, rows, cols, 1.0);
                for tokens in [1, 2, 3, 4, 5, 11, 12, 13, 25] {
                    let x: Vec<_> = (0..tokens).map(|_| rng.hostile(cols, 2.0)).collect();
                    check_product(isa, &t, &x, &format!("{} {rows}×{cols}", dtype.name()));
                }
            }
        }
        let t = tensor(&mut rng, WeightType::Q4_1, 40, 288, 1.0);
        for tokens in 1..=130 {
            let x: Vec<_> = (0..tokens).map(|_| rng.vec(288, 2.0)).collect();
            check_product(isa, &t, &x, "every token count");
        }
    }
    const { assert!(MAX_TB == 12) }; // the counts above straddle it and direct()'s 1 and 4
}

#[test]
fn products_keep_infinities_and_nan() {
    let mut rng = Rng(3);
    let mut bytes = Vec::new();
    for i in 0..40 * 64 {
        let odd = [f32::INFINITY, f32::NEG_INFINITY, f32::NAN, f32::MAX, 1e-45];
        let x = if i % 97 == 0 {
            rng.pick(&odd)
        } else {
            rng.unit()
        };
        bytes.extend(x.to_le_bytes());
    }
    let range = 0..bytes.len();
    let t = Tensor::new(WeightType::F32, 40, 64, std::sync::Arc::new(bytes), range).unwrap();
    for isa in paths() {
        for tokens in [1, 4, 5, 13] {
            let mut x: Vec<_> = (0..tokens).map(|_| rng.hostile(64, 1.0)).collect();
            x[0][3] = f32::INFINITY;
            check_product(isa, &t, &x, "infinities");
        }
    }
}

#[test]
fn rows_equal_the_contract() {
    let mut rng = Rng(4);
    for isa in paths() {
        for n in [1, 2, 15, 16, 17, 50, 64, 576, 1000] {
            for scale in [1.0, 1e-25, 1e15] {
                let (x, w) = (rng.vec(n, scale), rng.vec(n, 2.0));
                let mut want = vec![0.0; n];
                numerics::norm::rms_norm(&x, &w, 1e-5, &mut want);
                for stride in [1, 7] {
                    let mut y = vec![0.0; n * stride];
                    // SAFETY: `y` has n floats, `stride` apart.
                    unsafe {
                        let out = y.as_mut_ptr();
                        isa.run(Norm {
                            x: &x,
                            w: &w,
                            eps: 1e-5,
                            out,
                            stride,
                        });
                    }
                    let y: Vec<f32> = y.into_iter().step_by(stride).collect();
                    assert_same(&y, &want, "norm");
                }
                let h = rng.vec(n, 1.0);
                let (mut plain, mut normed) = (h.clone(), h.clone());
                // SAFETY: equal lengths.
                unsafe {
                    isa.run(Residual {
                        h: &mut plain,
                        branch: &x,
                        post: None,
                    });
                    isa.run(Residual {
                        h: &mut normed,
                        branch: &x,
                        post: Some((&w, 1e-5)),
                    });
                }
                let add = |b: &[f32]| h.iter().zip(b).map(|(h, b)| h + b).collect::<Vec<_>>();
                assert_same(&plain, &add(&x), "residual");
                assert_same(&normed, &add(&want), "post-norm");
            }
        }
        for d in [2, 16, 30, 64, 128] {
            let (cos, sin) = numerics::rope::angle_table(
                9,
                &numerics::rope::inverse_frequencies(d, 1e4, numerics::rope::RopeScaling::None),
            );
            for p in 0..9 {
                let row = p * d / 2..(p + 1) * d / 2;
                let (cos, sin) = (&cos[row.clone()], &sin[row]);
                let mut x = rng.hostile(d, 3.0);
                let mut want = x.clone();
                numerics::rope::rotate(&mut want, cos, sin);
                // SAFETY: lengths fit.
                unsafe {
                    isa.run(Rotate {
                        x: &mut x,
                        cos,
                        sin,
                    })
                };
                assert_same(&x, &want, "rotation");
            }
        }
        for n in [1, 3, 16, 19, 20, 21, 97, 1000] {
            for kind in 0..4 {
                let mut z: Vec<f32> = match kind {
                    0 => rng.vec(n, 20.0),
                    1 => (0..n).map(|_| rng.pick(&[1.0, -0.0, 0.0, 2.0])).collect(),
                    2 => rng.hostile(n, 5.0),
                    _ => (0..n)
                        .map(|_| rng.pick(&[f32::NEG_INFINITY, -3.0]))
                        .collect(),
                };
                let top = numerics::select::top_k(&z, 20).unwrap();
                let lse = numerics::select::log_sum_exp(&z);
                // SAFETY: kernels stay within the row.
                unsafe {
                    let max = isa.run(Canonical(&mut z)).unwrap();
                    let got = isa.run(Top { x: &z, n: 20 });
                    assert_eq!(got.len(), top.len());
                    for (g, w) in got.iter().zip(&top) {
                        assert!(g.0 == w.0 && same(g.1, w.1), "{g:?} instead of {w:?}");
                    }
                    if max.is_finite() {
                        let sum = isa.run(ExpSum { x: &z, max });
                        assert!(
                            same(numerics::select::log_of_sum(max, sum), lse),
                            "log-sum-exp"
                        );
                    } else {
                        assert!(same(max, lse), "log-sum-exp");
                    }
                    z[n / 2] = f32::NAN;
                    assert_eq!(isa.run(Canonical(&mut z)), None);
                }
            }
        }
    }
}

#[test]
fn a_missing_path_is_refused() {
    let mut rng = Rng(6);
    let mut spec = smollm2();
    (spec.config.hidden, spec.config.ffn, spec.config.vocab_size) = (32, 32, 32);
    spec.config.layers.truncate(1);
    let (config, weights) = build(&mut rng, &spec);
    let mut seen = 0;
    for isa in Isa::ALL {
        let options = CpuOptions {
            isa: Some(isa),
            threads: 1,
            kv_blocks: 1,
            vendor: false,
        };
        let loaded = CpuDevice::load(config.clone(), &weights, options);
        assert_eq!(loaded.is_ok(), isa.available());
        if let Err(e) = loaded {
            assert!(e.to_string().contains(isa.name()), "{e}");
            seen += 1;
        }
    }
    assert!(seen > 0, "no machine has all paths");
}

/// Runs a conformance test on every path with 2 threads, and with 1 and 3 on the fastest.
fn conform(test: fn(&crate::conformance::Factory) -> Result<(), String>) {
    for isa in paths() {
        for threads in [1, 2, 3] {
            if threads != 2 && isa != Isa::detect() {
                continue; // threads and paths meet only in shared code
            }
            let result = test(&|config, weights, kv_blocks| {
                let options = CpuOptions {
                    threads,
                    isa: Some(isa),
                    kv_blocks,
                    vendor: false,
                };
                let device =
                    CpuDevice::load(config, weights, options).map_err(|e| e.to_string())?;
                Ok(Box::new(device))
            });
            if let Err(e) = result {
                panic!("{} with {threads} threads: {e}", isa.name());
            }
        }
    }
}

#[test]
fn random_models_and_schedules_equal_the_reference() {
    conform(|f| crate::conformance::models(f, numerics::Profile::IeeeF32, 1));
}

#[test]
fn launch_sizes_equal_the_reference() {
    conform(|f| {
        let mut sizes: Vec<usize> = (1..=26).collect();
        sizes.extend([
            35, 36, 37, 47, 48, 49, 63, 64, 65, 95, 96, 97, 127, 128, 129, 130,
        ]);
        crate::conformance::launch_sizes(f, numerics::Profile::IeeeF32, WeightType::Q4_1, &sizes)?;
        crate::conformance::launch_sizes(
            f,
            numerics::Profile::IeeeF32,
            WeightType::F32,
            &[1, 2, 3, 4, 5, 12, 13],
        )
    });
}

/// Vendor launches may have other bits, never other results: logits agree to rounding, whatever the split and padding.
#[test]
fn vendor_launches_are_near_the_contract() {
    use crate::{Device, KernelFamily, KvSplit, Launch, OutputRow, Segment, StepPlan};
    let mut rng = Rng(8);
    let mut differed = 0;
    for case in 0..6 {
        let linear = [WeightType::Q4_1, WeightType::F32, WeightType::Q8_0][case % 3];
        let spec = crate::testing::random_spec(&mut rng, 64, 3, linear);
        let (config, weights) = build(&mut rng, &spec);
        let options = CpuOptions {
            threads: 2,
            kv_blocks: 12,
            vendor: true,
            isa: None,
        };
        let mut device = CpuDevice::load(config.clone(), &weights, options).unwrap();
        assert!(device.supports(KernelFamily::Vendor));
        let mut run = |family, kv_split, pad: usize| {
            let mut out = Vec::new();
            for (start, n) in [(0, 300), (300, 1)] {
                let segment = |s: usize| Segment {
                    offset: pad + s * (n + pad),
                    tokens: (0..n)
                        .map(|t| ((t * 7 + s + start) % config.vocab_size) as u32)
                        .collect(),
                    start,
                    blocks: (0..5).map(|b| (5 * s + b) as u32).collect(),
                    outputs: vec![OutputRow {
                        index: n - 1,
                        logits: true,
                        ..OutputRow::default()
                    }],
                };
                let segments = vec![segment(0), segment(1)];
                let rows = 2 * (n + pad) + 2 * pad;
                let launches = vec![Launch {
                    family,
                    rows,
                    kv_split,
                    logit_rows: crate::LogitRows::Together,
                    segments,
                }];
                let rows = device
                    .execute(&StepPlan { launches })
                    .unwrap()
                    .rows
                    .remove(0);
                out.extend(
                    rows.into_iter()
                        .flat_map(|mut r| r.remove(0).logits.unwrap()),
                );
            }
            out
        };
        let want = run(KernelFamily::Contract, KvSplit::Contract, 0);
        let size = want.iter().fold(0f32, |a, x| a.max(x.abs()));
        for (split, pad) in [
            (KvSplit::Contract, 0),
            (KvSplit::Parts(1), 3),
            (KvSplit::Parts(3), 0),
        ] {
            let got = run(KernelFamily::Vendor, split, pad);
            assert_eq!(got.len(), want.len());
            for (g, w) in got.iter().zip(&want) {
                assert!(
                    (g - w).abs() <= 1e-4 * size,
                    "{split:?}: {g} instead of {w}"
                );
                differed += u32::from(g.to_bits() != w.to_bits());
            }
        }
    }
    assert!(
        differed > 0,
        "vendor products were the contract's after all"
    );
}
