//! The list of cases: sizes on both sides of every tile, chunk and tail of any kernel, times kinds of values.

use super::{
    Attention, Case, Embed, Flavour, Gated, GatedProduct, Heads, Linear, Logits, Norm, Run,
};
use crate::testing::Rng;
use numerics::{attention, rope};

/// A case by name; its inputs are made when asked for.
pub struct Named {
    /// Operation, sizes and flavour; unique.
    pub name: String,
    make: Box<dyn Fn(&mut Rng) -> Case + Send + Sync>,
}

impl Named {
    /// The inputs, a function of the name.
    pub fn case(&self) -> Case {
        let hash = blake3::derive_key("blocklock hopper case inputs v1", self.name.as_bytes());
        let mut seed = [0; 8];
        seed.copy_from_slice(&hash[..8]);
        (self.make)(&mut Rng(u64::from_le_bytes(seed)))
    }
}

/// Every case, in a fixed order.
pub fn all() -> Vec<Named> {
    let mut list = Vec::new();
    linear(&mut list);
    rows(&mut list);
    heads(&mut list);
    attentions(&mut list);
    not_finite(&mut list);
    logits(&mut list);
    list
}

/// Products of gates and ups with their activation. Not among [`all`], whose results are recorded on a GPU: what these
/// give follows from operations that are.
pub fn gated_products() -> Vec<Named> {
    let mut list = Vec::new();
    let counts = [1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33];
    // Rows of G around tiles of 32, and more tiles than multiprocessors.
    let halves = [1, 8, 31, 32, 33, 63, 64, 65, 100];
    let widths = [16, 24, 64, 72, 136, 256, 264, 520, 33];
    let mut one = |tokens: usize, half: usize, width: usize, flavour: Flavour, gelu: bool| {
        let act = if gelu { "gelu_tanh" } else { "silu" };
        let name = format!(
            "gated product {act} {tokens}x{half}x{width} {}",
            flavour.name()
        );
        add(&mut list, name, move |rng| {
            let (outputs, scale) = (2 * half, 2.0 / (width as f32).sqrt());
            Case::GatedProduct(GatedProduct {
                product: Linear {
                    tokens,
                    outputs,
                    width,
                    x: flavour.halves(rng, tokens * width, 1.0),
                    w: flavour.halves(rng, outputs * width, scale),
                    bias: None,
                    wide: false,
                },
                gelu,
            })
        });
    };
    for (i, tokens) in counts.into_iter().enumerate() {
        for (j, half) in halves.into_iter().enumerate() {
            one(
                tokens,
                half,
                widths[(i + j) % 9],
                Flavour::ALL[(i + 2 * j) % 6],
                (i + j) % 2 == 0,
            );
        }
    }
    for flavour in Flavour::ALL {
        one(3, 130, 1032, flavour, false);
        one(20, 70, 576, flavour, true);
    }
    one(1, 64, 8192, Flavour::Mixed, false);
    one(2, 4300, 64, Flavour::Ordinary, true);
    one(32, 4300, 80, Flavour::Mixed, false);
    list
}

pub(super) fn add(
    list: &mut Vec<Named>,
    name: String,
    make: impl Fn(&mut Rng) -> Case + Send + Sync + 'static,
) {
    let make = Box::new(make);
    list.push(Named { name, make });
}

fn linear(list: &mut Vec<Named>) {
    let mut one =
        |tokens: usize, outputs: usize, width: usize, flavour: Flavour, bias: bool, wide: bool| {
            let extra = match (bias, wide) {
                (true, _) => "+bias",
                (_, true) => "+f32",
                _ => "",
            };
            let name = format!(
                "linear{extra} {tokens}x{outputs}x{width} {}",
                flavour.name()
            );
            add(list, name, move |rng| {
                let scale = 2.0 / (width as f32).sqrt();
                Case::Linear(Linear {
                    tokens,
                    outputs,
                    width,
                    x: flavour.halves(rng, tokens * width, 1.0),
                    w: flavour.halves(rng, outputs * width, scale),
                    bias: bias.then(|| Flavour::Ordinary.floats(rng, outputs, 0.5)),
                    wide,
                })
            });
        };
    // Token counts around every tile; K with every kind of tail (8 | K is what tensor maps can describe).
    let widths = [16, 24, 64, 72, 8, 136, 256, 264, 7, 33, 512, 520];
    let counts = [
        1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257,
    ];
    for (i, tokens) in counts.into_iter().enumerate() {
        let flavour = Flavour::ALL[i % 6];
        one(
            tokens,
            [1, 64, 65, 127, 40][i % 5],
            widths[i % 12],
            flavour,
            i % 4 == 1,
            i % 4 == 3,
        );
        one(
            tokens,
            [63, 33, 129, 8][i % 4],
            widths[(i + 5) % 12],
            Flavour::Ordinary,
            false,
            false,
        );
    }
    for flavour in Flavour::ALL {
        for (tokens, outputs, width) in
            [(3, 130, 1032), (20, 70, 576), (40, 66, 328), (100, 65, 200)]
        {
            one(tokens, outputs, width, flavour, false, false);
        }
        one(5, 200, 96, flavour, true, false);
        one(2, 257, 300, flavour, false, true);
    }
    one(1, 64, 8192, Flavour::Mixed, false, false);
    one(9, 64, 4104, Flavour::Ties, false, false);
    // More tiles than multiprocessors, so that a ring goes on from one to the next.
    one(1, 9000, 64, Flavour::Ordinary, false, false);
    one(33, 9000, 80, Flavour::Mixed, false, true);
    one(520, 2200, 72, Flavour::Ordinary, false, false);
}

fn rows(list: &mut Vec<Named>) {
    let widths = [8, 30, 64, 128, 576, 1016, 1024, 1032, 2048, 4104];
    for (i, width) in widths.into_iter().enumerate() {
        for flavour in Flavour::ALL {
            for branch in [false, true] {
                let extra = if branch { "+residual" } else { "" };
                let name = format!("norm{extra} 3x{width} {}", flavour.name());
                add(list, name, move |rng| {
                    Case::Norm(Norm {
                        width,
                        h: flavour.halves(rng, 3 * width, 1.0),
                        branch: branch.then(|| flavour.halves(rng, 3 * width, 1.0)),
                        w: (0..width).map(|_| 1.0 + 0.3 * rng.unit()).collect(),
                        eps: [1e-5, 1e-6][i % 2],
                    })
                });
            }
        }
    }
    for flavour in Flavour::ALL {
        for scale in [None, Some(7.3)] {
            let extra = if scale.is_some() { "+scale" } else { "" };
            add(
                list,
                format!("embed{extra} {}", flavour.name()),
                move |rng| {
                    Case::Embed(Embed {
                        ids: vec![4, 0, 18, 4, 7],
                        width: 133,
                        table: flavour.halves(rng, 19 * 133, 1.0),
                        scale,
                    })
                },
            );
        }
        for gelu in [false, true] {
            let act = if gelu { "gelu_tanh" } else { "silu" };
            for width in [1, 255, 256, 257] {
                add(
                    list,
                    format!("{act} 4x{width} {}", flavour.name()),
                    move |rng| {
                        Case::Gated(Gated {
                            width,
                            gate_up: flavour.halves(rng, 4 * 2 * width, 4.0),
                            gelu,
                        })
                    },
                );
            }
        }
    }
    for gelu in [false, true] {
        let act = if gelu { "gelu_tanh" } else { "silu" };
        add(list, format!("{act} of every bf16"), move |_| {
            let gates = (0..=u16::MAX).map(half::bf16::from_bits);
            let ups =
                (0..=u16::MAX).map(|i| half::bf16::from_f32(1.0 + f32::from(i % 256) / 128.0));
            Case::Gated(Gated {
                width: 1 << 16,
                gate_up: gates.chain(ups).collect(),
                gelu,
            })
        });
    }
}

fn heads(list: &mut Vec<Named>) {
    for (i, d) in [8, 16, 32, 64, 96, 128, 256].into_iter().enumerate() {
        for flavour in Flavour::ALL {
            for norms in [false, true] {
                let (heads, kv_heads) = [(2, 1), (4, 2), (3, 3)][i % 3];
                let extra = if norms { "+norm" } else { "" };
                add(
                    list,
                    format!("heads{extra} {heads}/{kv_heads}x{d} {}", flavour.name()),
                    move |rng| {
                        let inv = rope::inverse_frequencies(d, 1e4, rope::RopeScaling::None);
                        let (mut cos, mut sin) = (Vec::new(), Vec::new());
                        let tokens = 5;
                        for t in 0..tokens {
                            let (mut c, mut s) = (vec![0.0; d / 2], vec![0.0; d / 2]);
                            rope::cos_sin(t * t * 97, &inv, &mut c, &mut s);
                            cos.extend(c);
                            sin.extend(s);
                        }
                        let weights = |rng: &mut Rng| -> Vec<f32> {
                            (0..d).map(|_| 1.0 + 0.3 * rng.unit()).collect()
                        };
                        Case::Heads(Heads {
                            heads,
                            kv_heads,
                            head_dim: d,
                            qkv: flavour.halves(rng, tokens * (heads + 2 * kv_heads) * d, 1.0),
                            cos,
                            sin,
                            q_norm: norms.then(|| weights(rng)),
                            k_norm: norms.then(|| weights(rng)),
                            eps: 1e-6,
                        })
                    },
                );
            }
        }
    }
}

/// Scores that are even, peaked, or grow with the position.
#[derive(Clone, Copy)]
enum Peak {
    Even,
    Sharp,
    Rising,
}

fn attentions(list: &mut Vec<Named>) {
    let mut one = |heads: usize,
                   kv_heads: usize,
                   d: usize,
                   window: Option<usize>,
                   runs: &[(usize, usize)],
                   flavour: Flavour,
                   peak: Peak| {
        let shape: Vec<String> = runs.iter().map(|(s, n)| format!("{s}+{n}")).collect();
        let limit = window.map_or(String::new(), |w| format!(" window {w}"));
        let peak_name = match peak {
            Peak::Even => "",
            Peak::Sharp => " sharp",
            Peak::Rising => " rising",
        };
        let name = format!(
            "attention {heads}/{kv_heads}x{d}{limit} [{}] {}{peak_name}",
            shape.join(","),
            flavour.name()
        );
        let runs: Vec<Run> = runs
            .iter()
            .enumerate()
            .map(|(sequence, &(start, count))| Run {
                sequence,
                start,
                count,
            })
            .collect();
        add(list, name, move |rng| {
            let rows: usize = runs.iter().map(|r| r.count).sum();
            let strength = match peak {
                Peak::Even => 1.0,
                Peak::Sharp | Peak::Rising => 8.0,
            };
            let sequences = runs
                .iter()
                .map(|r| {
                    let length = r.start + r.count;
                    let mut k = flavour.halves(rng, length * kv_heads * d, 1.5);
                    let v = flavour.halves(rng, length * kv_heads * d, 1.5);
                    if let Peak::Rising = peak {
                        for (j, k) in k.chunks_exact_mut(kv_heads * d).enumerate() {
                            let grow = 0.1 + 4.0 * j as f32 / length as f32;
                            k.iter_mut()
                                .for_each(|x| *x = half::bf16::from_f32(x.to_f32() * grow));
                        }
                    }
                    (finite(k), finite(v))
                })
                .collect();
            Case::Attention(Attention {
                heads,
                kv_heads,
                head_dim: d,
                window,
                scale: attention::scale_log2e((d as f64).powf(-0.5)),
                sequences,
                q: flavour.halves(rng, rows * heads * d, 1.5 * strength),
                runs: runs.clone(),
            })
        });
    };
    // One query at positions on both sides of every step, page, tile and chunk.
    for (i, p) in [
        0, 1, 15, 16, 62, 63, 64, 65, 126, 127, 128, 129, 255, 256, 510, 511, 512, 513, 639, 640,
        1023, 1024, 1025, 1500,
    ]
    .into_iter()
    .enumerate()
    {
        let d = [64, 128, 256][i % 3];
        let (heads, kv_heads) = [(2, 1), (4, 2), (3, 3), (8, 1), (4, 1), (7, 1)][i % 6];
        let peak = [Peak::Even, Peak::Sharp, Peak::Rising][i / 3 % 3];
        one(heads, kv_heads, d, None, &[(p, 1)], Flavour::Ordinary, peak);
    }
    for flavour in Flavour::ALL {
        for d in [64, 128, 256] {
            one(
                2,
                1,
                d,
                None,
                &[(600, 1), (70, 1), (0, 1), (1100, 1)],
                flavour,
                Peak::Even,
            );
            one(1, 1, d, None, &[(0, 70)], flavour, Peak::Even);
        }
        one(
            2,
            1,
            128,
            Some(100),
            &[(0, 40), (90, 30), (700, 3)],
            flavour,
            Peak::Even,
        );
    }
    for d in [16, 32, 80, 96] {
        one(
            2,
            1,
            d,
            None,
            &[(0, 20), (130, 3), (513, 2)],
            Flavour::Ordinary,
            Peak::Even,
        );
        one(
            2,
            2,
            d,
            Some(17),
            &[(0, 20), (130, 3), (513, 2)],
            Flavour::Ordinary,
            Peak::Sharp,
        );
    }
    // Chunks of a prompt that begin and end anywhere.
    for (start, count) in [
        (0, 64),
        (0, 65),
        (0, 129),
        (1, 63),
        (63, 2),
        (64, 65),
        (100, 60),
        (127, 130),
        (450, 70),
        (511, 3),
        (512, 66),
    ] {
        for d in [64, 128] {
            one(
                2,
                1,
                d,
                None,
                &[(start, count)],
                Flavour::Ordinary,
                Peak::Rising,
            );
        }
    }
    for window in [1, 16, 63, 64, 65, 128, 200, 512, 600] {
        one(
            2,
            1,
            128,
            Some(window),
            &[(0, 10), (120, 12), (505, 12), (1010, 20)],
            Flavour::Ordinary,
            Peak::Sharp,
        );
    }
}

/// A position whose key or value was not finite: its key is kept as NaN, its value as +0. Queries that see it are NaN,
/// others, and other heads, as if it were not there.
fn not_finite(list: &mut Vec<Named>) {
    for d in [64, 96, 128, 256] {
        for (what, window, runs) in [
            (
                "prefill",
                None,
                [(0, 70, 40), (100, 40, 120), (500, 30, 520)],
            ),
            ("decode", None, [(600, 1, 550), (70, 1, 71), (1100, 1, 3)]),
            (
                "window",
                Some(64),
                [(0, 200, 90), (300, 1, 200), (520, 20, 470)],
            ),
        ] {
            add(
                list,
                format!("attention of a NaN key x{d} {what}"),
                move |rng| {
                    let (heads, kv_heads) = (4, 2);
                    let sequences = runs.map(|(start, count, at)| {
                        let n = (start + count) * kv_heads * d;
                        let mut k = Flavour::Ordinary.halves(rng, n, 1.5);
                        let mut v = Flavour::Ordinary.halves(rng, n, 1.5);
                        let head = at * kv_heads * d;
                        if at < start + count {
                            k[head..head + d].fill(half::bf16::NAN);
                            v[head..head + d].fill(half::bf16::ZERO);
                        }
                        (k, v)
                    });
                    let rows: usize = runs.iter().map(|r| r.1).sum();
                    Case::Attention(Attention {
                        heads,
                        kv_heads,
                        head_dim: d,
                        window,
                        scale: attention::scale_log2e((d as f64).powf(-0.5)),
                        sequences: sequences.to_vec(),
                        q: Flavour::Ordinary.halves(rng, rows * heads * d, 1.5),
                        runs: runs
                            .iter()
                            .enumerate()
                            .map(|(sequence, &(start, count, _))| Run {
                                sequence,
                                start,
                                count,
                            })
                            .collect(),
                    })
                },
            );
        }
    }
}

/// Keys and values are finite when they are stored.
fn finite(x: Vec<half::bf16>) -> Vec<half::bf16> {
    x.into_iter()
        .map(|x| {
            if x.is_finite() {
                x
            } else {
                half::bf16::from_f32(3e38)
            }
        })
        .collect()
}

fn logits(list: &mut Vec<Named>) {
    for vocab in [1, 5, 19, 20, 21, 1023, 1024, 1025, 49152, 151_936] {
        for flavour in Flavour::ALL {
            if vocab > 2000 && flavour != Flavour::Ordinary && flavour != Flavour::Ties {
                continue;
            }
            add(
                list,
                format!("logits 2x{vocab} {}", flavour.name()),
                move |rng| {
                    Case::Logits(Logits {
                        vocab,
                        z: flavour.floats(rng, 2 * vocab, 12.0),
                    })
                },
            );
        }
    }
    add(list, "logits all equal".into(), |_| {
        Case::Logits(Logits {
            vocab: 3000,
            z: vec![-0.0; 3000],
        })
    });
    add(list, "logits with a NaN in one row".into(), |rng| {
        let mut z = Flavour::Ordinary.floats(rng, 3 * 2000, 5.0);
        z[2000 + 1999] = f32::NAN;
        Case::Logits(Logits { vocab: 2000, z })
    });
    add(list, "logits of infinities".into(), |rng| {
        let mut z = Flavour::Ordinary.floats(rng, 3 * 100, 5.0);
        z[..100].fill(f32::NEG_INFINITY);
        z[150] = f32::INFINITY;
        z[250] = f32::NEG_INFINITY;
        Case::Logits(Logits { vocab: 100, z })
    });
}
