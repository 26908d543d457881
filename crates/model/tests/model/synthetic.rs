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
