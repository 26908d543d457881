//! Synthetic models: the same everywhere, for ever.

use model::load::{LoadError, ModelSource};
use model::synthetic::Synthetic;

#[test]
fn weights_are_pinned() {
    let hash = |name: &str| {
        Synthetic::parse(name)
            .unwrap()
            .weights()
            .content_hash()
            .short()
    };
    assert_eq!(hash("tiny-llama"), hash("tiny-llama@0"));
    let hashes = ["tiny-llama", "tiny-llama@1", "tiny-llama-k"].map(hash);
    assert_eq!(hashes, ["604ee0f26d8d", "5be2ccd545ec", "e4358b2ae0fe"]);
    let hashes = ["tiny-qwen2", "tiny-qwen3", "tiny-gemma3"].map(hash);
    assert_eq!(hashes, ["71761dab4195", "0a122fdc0dde", "813d5bdce879"]);
}

/// Sizes as published: of files in bf16, and of weights with a tied head counted once.
#[test]
fn shapes_have_as_many_parameters_as_the_originals() {
    for (name, parameters) in [
        ("smollm2-135m", 134_515_008),
        ("llama-3.1-8b", 8_030_261_248),
        ("qwen3-0.6b", 596_049_920),
        ("qwen3-1.7b", 1_720_574_976),
        ("qwen3-4b", 4_022_468_096),
        ("qwen3-8b", 8_190_735_360),
        ("qwen3-14b", 14_768_307_200),
        ("gemma-3-270m", 268_098_176),
        ("gemma-3-1b", 999_885_952),
        // The text part.
        ("gemma-3-4b", 3_880_263_168),
        ("gemma-3-12b", 11_766_034_176),
    ] {
        // Nothing is generated for this.
        let model = model::load(&ModelSource::parse(&format!("synthetic:{name}")).unwrap());
        assert_eq!(model.unwrap().parameters(), parameters, "{name}");
    }
}

#[test]
fn weights_are_spread_as_said() {
    let w = Synthetic::parse("tiny-llama-k@1").unwrap().weights();
    let mut row = vec![0f32; 256];
    let mut sum = [0f64; 2];
    for r in 0..512 {
        numerics::weight::widen_row(w.embed.dtype, w.embed.row(r), &mut row);
        for &v in &row {
            sum[0] += f64::from(v);
            sum[1] += f64::from(v) * f64::from(v);
        }
    }
    let n = 512.0 * 256.0;
    let (mean, deviation) = (sum[0] / n, (sum[1] / n).sqrt());
    assert!(mean.abs() < 0.002, "{mean}");
    assert!((deviation / (3.0 / 16.0) - 1.0).abs() < 0.02, "{deviation}");
}

#[test]
fn configurations_are_valid() {
    for name in Synthetic::names() {
        Synthetic::parse(name).unwrap().config().validate().unwrap();
    }
}

#[test]
fn unknown_names_and_seeds_are_refused() {
    let refused = |s: &str| match ModelSource::parse(s) {
        Err(e @ LoadError::Synthetic(_)) => e.to_string(),
        other => panic!("{s}: {other:?}"),
    };
    for name in ["", "llama", "tiny-llama ", "TINY-LLAMA"] {
        let e = refused(&format!("synthetic:{name}"));
        assert_eq!(
            e,
            format!(
                "no synthetic model \"{name}\", allowed: {}",
                Synthetic::names().join(", ")
            )
        );
    }
    for seed in [
        "",
        "-1",
        "+1",
        "1.0",
        "x",
        "0x1",
        " 1",
        "18446744073709551616",
    ] {
        let e = refused(&format!("synthetic:tiny-llama@{seed}"));
        assert_eq!(
            e,
            format!("seed \"{seed}\" of a synthetic model, allowed: an integer from 0 to 2^64-1")
        );
    }
    assert!(ModelSource::parse("synthetic:tiny-llama@18446744073709551615").is_ok());
}

#[test]
fn a_recipe_makes_any_part_of_a_matrix() {
    let w = Synthetic::parse("tiny-gemma3@9").unwrap().weights();
    for tensor in [&w.embed, &w.layers[1].k, &w.layers[2].down] {
        let recipe = tensor.recipe().unwrap();
        for (first, count) in [(0, 5), (1, 3), (2, 2), (3, 96), (95, 97), (1001, 1)] {
            let mut made = vec![0; 2 * count];
            recipe.fill(first as u64, &mut made);
            assert_eq!(made, tensor.bytes()[2 * first..][..2 * count]);
        }
        let mut buffer = Vec::new();
        for r in [0, 1, tensor.rows - 1] {
            assert_eq!(tensor.row_in(r, &mut buffer), tensor.row(r));
        }
    }
}
