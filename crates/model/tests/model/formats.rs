//! The same weights through GGUF and safetensors, and the real model.

use model::gguf::GgufFile;
use model::hf::{self, Checkpoint};
use model::load::{ModelSource, TextSource, load};
use model::synthetic::Synthetic;
use model::{ModelConfig, Weights, testing};
use numerics::digest::{Digest, Encoder};
use numerics::rope::RopeScaling;
use numerics::weight::{WeightType, widen_row};
use std::sync::Arc;

const PLAIN: [WeightType; 3] = [WeightType::F32, WeightType::F16, WeightType::Bf16];
const QUANTISED: [WeightType; 8] = [
    WeightType::Q8_0,
    WeightType::Q4_0,
    WeightType::Q4_1,
    WeightType::Q5_0,
    WeightType::Q5_1,
    WeightType::Q4K,
    WeightType::Q5K,
    WeightType::Q6K,
];

pub fn from_gguf(config: &ModelConfig, weights: &Weights) -> (ModelConfig, Weights) {
    let file = testing::gguf_file(
        &testing::gguf_metadata(config),
        &testing::gguf_tensors(config, weights),
    );
    let file = GgufFile::parse(Arc::new(file)).expect("a valid file");
    file.model().expect("a valid model")
}

pub fn from_hf(config: &ModelConfig, weights: &Weights) -> (ModelConfig, Weights) {
    let mut checkpoint = Checkpoint::default();
    let file = testing::safetensors_file(&testing::hf_tensors(config, weights));
    checkpoint
        .add("model.safetensors", Arc::new(file))
        .expect("a valid file");
    let json = testing::hf_config(config, weights.lm_head.is_none()).to_string();
    hf::model(json.as_bytes(), &checkpoint).expect("a valid model")
}

fn identity(config: &ModelConfig) -> Digest {
    let mut e = Encoder::new("test");
    config.encode_canonical(&mut e);
    e.finish()
}

/// Every value of a model, widened, in one order.
fn values(w: &Weights) -> Vec<u32> {
    let mut out = Vec::new();
    let mut add = |t: &model::Tensor| {
        let mut row = vec![0.0; t.cols];
        for r in 0..t.rows {
            widen_row(t.dtype, t.row(r), &mut row);
            out.extend(row.iter().map(|v| v.to_bits()));
        }
    };
    add(&w.embed);
    w.lm_head.iter().for_each(&mut add);
    for l in &w.layers {
        l.matrices().iter().for_each(|(_, t)| add(t));
    }
    for l in &w.layers {
        l.vectors()
            .for_each(|(_, v)| out.extend(v.iter().map(|x| x.to_bits())));
    }
    out.extend(w.final_norm.iter().map(|x| x.to_bits()));
    out
}

#[test]
fn plain_formats_agree_bit_for_bit() {
    for name in [
        "tiny-llama@3",
        "tiny-llama-k@4",
        "tiny-qwen2@3",
        "tiny-qwen3@3",
        "tiny-gemma3@3",
    ] {
        let s = Synthetic::parse(name).unwrap();
        let mut config = s.config();
        let other = Synthetic::parse(&name.replace('@', "@9"))
            .unwrap()
            .weights();
        for dtype in PLAIN {
            let mut weights = testing::restored(&s.weights(), dtype);
            // The root of 96 in the embedding's type.
            config.embed_scale = config.embed_scale.map(|_| match dtype {
                WeightType::F16 => 9.796_875,
                WeightType::Bf16 => 9.8125,
                _ => 9.797_959,
            });
            for untied in [false, true] {
                weights.lm_head = untied.then(|| testing::restored(&other, dtype).embed);
                let (gguf_config, gguf) = from_gguf(&config, &weights);
                let (hf_config, hf) = from_hf(&config, &weights);
                assert_eq!(gguf_config, config);
                assert_eq!(hf_config, config);
                assert_eq!(identity(&gguf_config), identity(&hf_config));
                assert_eq!(gguf.lm_head.is_some(), untied);
                let expected = values(&weights);
                assert!(values(&gguf) == expected, "{name} {dtype:?} GGUF");
                assert!(values(&hf) == expected, "{name} {dtype:?} safetensors");
                assert_eq!(gguf.content_hash(), weights.content_hash());
                assert_eq!(hf.content_hash(), weights.content_hash());
            }
        }
    }
}

#[test]
fn quantised_formats_load_and_equal_their_f32_safetensors() {
    let s = Synthetic::parse("tiny-llama-k@5").unwrap();
    let mut hashes = Vec::new();
    for dtype in QUANTISED {
        let weights = testing::restored(&s.weights(), dtype);
        let (_, gguf) = from_gguf(&s.config(), &weights);
        assert_eq!(gguf.layers[1].q.dtype, dtype);
        assert_eq!(gguf.layers[1].q.bytes(), weights.layers[1].q.bytes());
        let widened = testing::restored(&weights, WeightType::F32);
        let (_, hf) = from_hf(&s.config(), &widened);
        assert!(values(&gguf) == values(&hf), "{dtype:?}");
        assert_eq!(gguf.content_hash(), hf.content_hash());
        assert!(values(&gguf).iter().all(|&v| f32::from_bits(v).is_finite()));
        hashes.push(gguf.content_hash());
    }
    hashes.sort();
    hashes.dedup();
    assert_eq!(hashes.len(), QUANTISED.len());
}

#[test]
fn one_changed_weight_changes_the_hash() {
    let s = Synthetic::parse("tiny-llama@3").unwrap();
    let weights = s.weights();
    let hash = weights.content_hash();
    let mut other = weights.clone();
    other.layers[1].ffn_norm[63] = f32::from_bits(other.layers[1].ffn_norm[63].to_bits() ^ 1);
    assert_ne!(other.content_hash(), hash);
    let mut swapped = weights.clone();
    let layer = &mut swapped.layers[0];
    std::mem::swap(&mut layer.gate, &mut layer.up);
    assert_ne!(swapped.content_hash(), hash);
    // A head equal to the embedding is the tied model.
    let mut explicit = weights.clone();
    explicit.lm_head = Some(weights.embed.clone());
    assert_eq!(explicit.content_hash(), hash);
}

#[test]
fn padded_vocabulary_rows_are_dropped() {
    let s = Synthetic::parse("tiny-llama@3").unwrap();
    let (config, weights) = (s.config(), s.weights());
    let mut short = config.clone();
    short.vocab_size = 500;
    for (c, w) in [from_gguf(&short, &weights), from_hf(&short, &weights)] {
        assert_eq!((c.vocab_size, w.embed.rows), (500, 500));
        assert_eq!(w.embed.bytes(), &weights.embed.bytes()[..500 * 64 * 2]);
    }
}

#[test]
fn rope_scaling_is_one_configuration_in_both_formats() {
    let s = Synthetic::parse("tiny-llama@3").unwrap();
    let weights = s.weights();
    let llama3 = RopeScaling::Llama3 {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_context: 8192,
    };
    for scaling in [RopeScaling::Linear { factor: 4.0 }, llama3] {
        let mut config = s.config();
        for layer in &mut config.layers {
            layer.rope.scaling = scaling;
            layer.rope.theta = 500_000.0;
        }
        let (hf, _) = from_hf(&config, &weights);
        assert_eq!(hf, config);

        let mut tensors = testing::gguf_tensors(&config, &weights);
        if scaling == llama3 {
            tensors.push(rope_freqs(&config, 1.0));
        }
        let file = testing::gguf_file(&testing::gguf_metadata(&config), &tensors);
        let (gguf, _) = GgufFile::parse(Arc::new(file)).unwrap().model().unwrap();
        assert_eq!(gguf, config);
        assert_eq!(identity(&gguf), identity(&hf));
    }
    // Divisors of no known scaling are refused.
    let mut config = s.config();
    config.layers[0].rope.scaling = llama3;
    let mut tensors = testing::gguf_tensors(&config, &weights);
    tensors.push(rope_freqs(&config, 1.2));
    let file = testing::gguf_file(&testing::gguf_metadata(&config), &tensors);
    let e = GgufFile::parse(Arc::new(file))
        .unwrap()
        .model()
        .map(|_| ())
        .unwrap_err();
    assert!(
        e.to_string()
            .starts_with("tensor \"rope_freqs.weight\": its content is"),
        "{e}"
    );
}

/// What a converter writes, computed in f32; every divisor but the last times `wrong`.
fn rope_freqs(config: &ModelConfig, wrong: f32) -> testing::Written {
    let rope = &config.layers[0].rope;
    let d = config.head_dim;
    let plain = numerics::rope::inverse_frequencies(d, rope.theta, RopeScaling::None);
    let scaled = numerics::rope::inverse_frequencies(d, rope.theta, rope.scaling);
    let factors: Vec<f32> = plain
        .iter()
        .zip(&scaled)
        .map(|(p, s)| *p as f32 / *s as f32)
        .collect();
    let last = factors.len() - 1;
    let written = factors
        .iter()
        .enumerate()
        .map(|(i, f)| if i == last { *f } else { f * wrong });
    testing::Written {
        name: "rope_freqs.weight".to_string(),
        dtype: WeightType::F32,
        shape: vec![d / 2],
        bytes: written.flat_map(f32::to_le_bytes).collect(),
    }
}

#[test]
fn files_on_disk_load_by_name() {
    let s = Synthetic::parse("tiny-llama@7").unwrap();
    let (config, weights) = (s.config(), s.weights());
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path();
    let gguf = root.join("tiny.gguf");
    let metadata = testing::gguf_metadata(&config);
    std::fs::write(
        &gguf,
        testing::gguf_file(&metadata, &testing::gguf_tensors(&config, &weights)),
    )
    .unwrap();

    let json = testing::hf_config(&config, true).to_string();
    let tensors = testing::hf_tensors(&config, &weights);
    let single = root.join("single");
    let sharded = root.join("sharded");
    for dir in [&single, &sharded] {
        std::fs::create_dir(dir).unwrap();
        std::fs::write(dir.join("config.json"), &json).unwrap();
    }
    std::fs::write(
        single.join("model.safetensors"),
        testing::safetensors_file(&tensors),
    )
    .unwrap();
    let (a, b) = tensors.split_at(7);
    let mut map = serde_json::Map::new();
    for (file, part) in [
        ("model-00001-of-00002.safetensors", a),
        ("model-00002-of-00002.safetensors", b),
    ] {
        std::fs::write(sharded.join(file), testing::safetensors_file(part)).unwrap();
        map.extend(part.iter().map(|t| (t.name.clone(), file.into())));
    }
    let index = serde_json::json!({"metadata": {"total_size": 1}, "weight_map": map});
    std::fs::write(
        sharded.join("model.safetensors.index.json"),
        index.to_string(),
    )
    .unwrap();

    let open = |path: &std::path::Path| load(&ModelSource::parse(path.to_str().unwrap()).unwrap());
    let synthetic = load(&ModelSource::parse("synthetic:tiny-llama@7").unwrap()).unwrap();
    assert_eq!(synthetic.name, "synthetic:tiny-llama@7");
    assert!(matches!(synthetic.text, TextSource::None));
    for (path, name) in [
        (&gguf, "tiny.gguf"),
        (&single, "single"),
        (&sharded, "sharded"),
    ] {
        let m = open(path).unwrap();
        assert_eq!(m.name, name);
        assert_eq!(*m.config, *synthetic.config);
        assert_eq!(m.weights_hash(), synthetic.weights_hash());
        assert_eq!(m.parameters(), synthetic.parameters());
        assert_eq!(m.formats(), "BF16 ×15");
    }
    assert!(matches!(open(&gguf).unwrap().text, TextSource::Gguf(_)));
    assert!(matches!(
        open(&single).unwrap().text,
        TextSource::Directory(_)
    ));
}

#[test]
fn the_real_model_loads() {
    let Some(path) = std::env::var_os("BLOCKLOCK_SMOLLM2") else {
        println!("not run: BLOCKLOCK_SMOLLM2 does not name SmolLM2-135M-Instruct.Q4_1.gguf");
        return;
    };
    let start = std::time::Instant::now();
    let source = ModelSource::parse(path.to_str().unwrap()).unwrap();
    let m = load(&source).unwrap();
    println!("loaded in {:?}", start.elapsed());
    let expected = Synthetic::parse("smollm2-135m").unwrap().config();
    assert_eq!(*m.config, expected);
    assert_eq!(m.parameters(), 134_515_008);
    assert_eq!(m.formats(), "Q4_1 ×210, Q8_0 ×1");
    let start = std::time::Instant::now();
    println!(
        "weights {} hashed in {:?}",
        m.weights_hash(),
        start.elapsed()
    );
}
