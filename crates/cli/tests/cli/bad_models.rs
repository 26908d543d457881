//! Model files that are damaged, absurd or not what the architecture needs: one line, exit code 2, at once.

use crate::bad_input::refused;
use crate::support::*;
use crate::worded::{Gguf, Hf};
use model::gguf::Value;
use numerics::weight::WeightType;

fn generate(model: &str) -> [&str; 7] {
    let ids = ["--prompt-ids", "1,2,3", "--max-tokens", "2"];
    ["generate", "--model", model, ids[0], ids[1], ids[2], ids[3]]
}

#[test]
fn the_undamaged_files_run() {
    let folder = folder();
    let gguf = crate::worded::worded(&folder);
    let hf = Hf::tiny(512);
    let hf = hf.write(&folder, &hf.bytes());
    let expected = json(&[&generate(TINY)[..], &["--json"]].concat());
    for model in [&gguf, &hf] {
        let report = json(&[&generate(model)[..], &["--json"]].concat());
        let steps = |r: &serde_json::Value| r["choices"][0]["steps"].clone();
        let bits = |r| {
            let steps = steps(r);
            let steps = steps.as_array().expect("steps").clone();
            let top = |s: &serde_json::Value| {
                let top = s["top"].as_array().expect("top").iter();
                top.map(|e| (e["id"].clone(), e["bits"].clone()))
                    .collect::<Vec<_>>()
            };
            steps.iter().map(top).collect::<Vec<_>>()
        };
        assert_eq!(bits(&report), bits(&expected), "{model}");
    }
}

#[test]
fn damaged_gguf() {
    let folder = folder();
    let good = Gguf::tiny(512).bytes();
    let spoilt = |at: usize, bytes: &[u8]| {
        let mut file = good.clone();
        file[at..at + bytes.len()].copy_from_slice(bytes);
        file
    };
    let huge = u64::MAX.to_le_bytes();
    for (name, bytes, says) in [
        ("empty", vec![], "not a GGUF file"),
        (
            "truncated header",
            good[..300].to_vec(),
            "the file has only",
        ),
        ("truncated data", good[..good.len() - 1000].to_vec(), "byte"),
        ("wrong magic", spoilt(0, b"GGML"), "not a GGUF file"),
        ("wrong version", spoilt(4, &[99]), "version 99"),
        ("absurd tensor count", spoilt(8, &huge), "tensor count"),
        ("absurd metadata count", spoilt(16, &huge), "metadata count"),
        ("corrupted key length", spoilt(24, &huge), "metadata key"),
        ("corrupted key", spoilt(32, &[0xff]), "UTF-8"),
    ] {
        let path = file(&folder, &format!("{name}.gguf"), bytes);
        refused(&generate(&path), &[name, says]);
    }
}

#[test]
fn gguf_that_is_not_a_model_we_run() {
    type Change = fn(&mut Gguf);
    fn set(model: &mut Gguf, key: &str, value: Value) {
        model.metadata.retain(|(k, _)| k != key);
        model.metadata.push((key.into(), value));
    }
    fn tensor<'a>(model: &'a mut Gguf, name: &str) -> &'a mut model::testing::Written {
        let found = model.tensors.iter_mut().find(|t| t.name == name);
        found.expect("a tensor of that name")
    }
    let folder = folder();
    let changes: [(&str, Change, &str); 7] = [
        (
            "missing tensor",
            |m| m.tensors.retain(|t| t.name != "blk.1.ffn_up.weight"),
            "\"blk.1.ffn_up.weight\" is missing",
        ),
        (
            "wrong shape",
            |m| tensor(m, "blk.0.attn_q.weight").shape = vec![32, 128],
            "[32, 128]",
        ),
        (
            "wrong type",
            |m| {
                let norm = tensor(m, "output_norm.weight");
                norm.dtype = WeightType::Q8_0;
                norm.bytes.truncate(68);
            },
            "Q8_0",
        ),
        (
            "unknown architecture",
            |m| set(m, "general.architecture", Value::Str("mamba".into())),
            "\"mamba\"",
        ),
        (
            "absurd size",
            |m| set(m, "llama.block_count", Value::U32(u32::MAX)),
            "4294967295",
        ),
        (
            "unknown tokenizer",
            |m| set(m, "tokenizer.ggml.model", Value::Str("llama".into())),
            "tokenizer",
        ),
        ("tokenizer too large", |m| *m = Gguf::tiny(600), "600"),
    ];
    for (name, change, says) in changes {
        let mut model = Gguf::tiny(512);
        change(&mut model);
        let path = file(&folder, &format!("{name}.gguf"), model.bytes());
        refused(&generate(&path), &[says]);
    }
}

#[test]
fn damaged_safetensors() {
    let good = Hf::tiny(512).bytes();
    let spoilt = |at: usize, bytes: &[u8]| {
        let mut file = good.clone();
        file[at..at + bytes.len()].copy_from_slice(bytes);
        file
    };
    for (name, bytes) in [
        ("empty", vec![]),
        ("truncated header", good[..300].to_vec()),
        ("truncated data", good[..good.len() - 1000].to_vec()),
        ("wrong magic", spoilt(0, b"PK\x03\x04PK\x03\x04")),
        ("absurd header", spoilt(0, &u64::MAX.to_le_bytes())),
        ("corrupted header", spoilt(9, b"\xff\xff")),
    ] {
        let folder = folder();
        let path = Hf::tiny(512).write(&folder, &bytes);
        println!("{name}");
        refused(&generate(&path), &["model.safetensors"]);
    }
}

#[test]
fn safetensors_that_are_not_a_model_we_run() {
    type Change = fn(&mut Hf);
    let changes: [(Change, &str); 7] = [
        (
            |m| m.tensors.retain(|t| !t.name.contains("1.mlp.up_proj")),
            "model.layers.1.mlp.up_proj.weight\" is missing",
        ),
        (|m| m.tensors[0].shape = vec![256, 128], "[256, 128]"),
        (
            |m| m.config["architectures"] = serde_json::json!(["MambaForCausalLM"]),
            "Mamba",
        ),
        (
            |m| m.config["num_hidden_layers"] = serde_json::json!(1u64 << 40),
            "number of layers is 1099511627776",
        ),
        (
            |m| m.config["hidden_size"] = serde_json::json!("wide"),
            "hidden_size",
        ),
        (|m| *m = Hf::tiny(600), "600"),
        (|m| m.tokenizer = serde_json::json!({}), "tokenizer.json"),
    ];
    for (change, says) in changes {
        let folder = folder();
        let mut model = Hf::tiny(512);
        change(&mut model);
        let path = model.write(&folder, &model.bytes());
        refused(&generate(&path), &[says]);
    }
    // The same number of bytes, said to be integers.
    let folder = folder();
    let model = Hf::tiny(512);
    let mut bytes = model.bytes();
    let at = bytes
        .windows(5)
        .position(|w| w == b"\"F32\"")
        .expect("an F32 tensor");
    bytes[at + 1] = b'I';
    refused(&generate(&model.write(&folder, &bytes)), &["I32"]);
}
