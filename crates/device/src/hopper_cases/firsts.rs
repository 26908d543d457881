//! Cases of the first tokens by a product: vocabularies around tiles and around as many tiles as a GPU has multiprocessors,
//! and logits in orders that leave a kernel which keeps only some of them with none to leave out.

use super::list::{Named, add};
use super::{Case, Firsts, Flavour, Linear};
use half::bf16;

/// How logits lie among ids.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Order {
    /// Token i's logit is i, so that each is larger than all before it.
    Ascending,
    Descending,
    /// All of one value.
    Equal,
    /// 0, half of them −0 before they count.
    Zero,
    /// Every 50th is 1, the rest 0.
    Few,
    /// Token 7's is NaN, of either sign, in every row; ordinary otherwise.
    Nan,
    /// NaN in the second row alone.
    NanRow,
    Infinite,
}

const ORDERS: [Order; 8] = [
    Order::Ascending,
    Order::Descending,
    Order::Equal,
    Order::Zero,
    Order::Few,
    Order::Nan,
    Order::NanRow,
    Order::Infinite,
];

/// All of them, in a fixed order. What they give follows from operations whose results are recorded.
pub fn firsts() -> Vec<Named> {
    let mut list = Vec::new();
    let counts = [
        1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129,
    ];
    // Around 20, tiles of 128, 20 tiles, and one, two and three tiles for each of 132 multiprocessors.
    let small = [1, 19, 20, 21, 127, 128, 129, 257, 2559, 2560, 2561];
    let large = [16_895, 16_896, 16_897, 33_793, 50_689];
    let widths = [8, 16, 24, 72, 136, 33];
    for (i, tokens) in counts.into_iter().enumerate() {
        for (j, vocab) in small.into_iter().enumerate() {
            let flavour = Flavour::ALL[(i + j) % 6];
            ordinary(&mut list, tokens, vocab, widths[(2 * i + j) % 6], flavour);
        }
    }
    for (i, tokens) in [1, 8, 32, 33, 65, 128].into_iter().enumerate() {
        for (j, vocab) in large.into_iter().enumerate() {
            let flavour = Flavour::ALL[(i + j) % 5];
            ordinary(&mut list, tokens, vocab, widths[(i + j) % 4], flavour);
        }
    }
    ordinary(&mut list, 3, 49_152, 576, Flavour::Ordinary);
    ordinary(&mut list, 2, 151_936, 64, Flavour::Ordinary);
    for order in ORDERS {
        for (tokens, vocab) in [
            (2, 3000),
            (17, 16_897),
            (33, 2600),
            (70, 33_793),
            (2, 60_000),
        ] {
            ordered(&mut list, tokens, vocab, order);
        }
    }
    list
}

fn ordinary(list: &mut Vec<Named>, tokens: usize, vocab: usize, width: usize, flavour: Flavour) {
    let name = format!("first tokens {tokens}x{vocab}x{width} {}", flavour.name());
    // Some matrices have rows of padding, large here.
    let outputs = vocab + [0, 0, 5, 64][vocab % 4];
    add(list, name, move |rng| {
        let mut w = flavour.halves(rng, vocab * width, 2.0 / (width as f32).sqrt());
        w.extend(Flavour::Ordinary.halves(rng, (outputs - vocab) * width, 1e30));
        let x = flavour.halves(rng, tokens * width, 4.0);
        case(x, w, (tokens, outputs, width), vocab)
    });
}

/// Two columns: token i's row is (i / 256, i % 256), which bf16 holds exactly; a row of x is (256 s, s), s a power of two.
fn ordered(list: &mut Vec<Named>, tokens: usize, vocab: usize, order: Order) {
    let width = 8;
    add(
        list,
        format!("first tokens {tokens}x{vocab} {order:?}"),
        move |rng| {
            let half = |x: f32| bf16::from_f32(x);
            let mut w = vec![bf16::ZERO; vocab * width];
            for (i, row) in w.chunks_exact_mut(width).enumerate() {
                let of = |n: usize| [(n / 256) as f32, (n % 256) as f32];
                let pair = match order {
                    Order::Ascending => of(i),
                    Order::Descending => of(vocab - i),
                    Order::Equal => [3.0, 0.0],
                    Order::Zero => [[0.0, -0.0][i % 2], -0.0],
                    Order::Few => [f32::from(u8::from(i % 50 == 49)), 0.0],
                    Order::Nan if i == 7 => [[f32::NAN, -f32::NAN][vocab % 2], 0.0],
                    Order::Infinite => match i % 1000 {
                        0 => [f32::INFINITY, 0.0],
                        n if n < 500 => [f32::NEG_INFINITY, 0.0],
                        _ => [rng.unit(), 0.0],
                    },
                    Order::Nan | Order::NanRow => [rng.unit(), rng.unit()],
                };
                row[0] = half(pair[0]);
                row[1] = half(pair[1]);
            }
            let mut x = vec![bf16::ZERO; tokens * width];
            for (t, row) in x.chunks_exact_mut(width).enumerate() {
                let scale = [1.0, 4.0, 0.25][t % 3];
                row[0] = half(256.0 * scale);
                row[1] = half(scale);
                if order == Order::NanRow && t == 1 {
                    row[1] = bf16::NAN;
                }
            }
            case(x, w, (tokens, vocab, width), vocab)
        },
    );
}

fn case(
    x: Vec<bf16>,
    w: Vec<bf16>,
    (tokens, outputs, width): (usize, usize, usize),
    vocab: usize,
) -> Case {
    Case::Firsts(Firsts {
        product: Linear {
            tokens,
            outputs,
            width,
            x,
            w,
            bias: None,
            wide: true,
        },
        vocab,
    })
}
