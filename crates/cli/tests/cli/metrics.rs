//! `/metrics`: the names that docs/METRICS.md explains, and what they say.

use crate::serving::*;
use crate::support::*;
use serde_json::json;
use std::collections::BTreeMap;

/// Names and types of a page.
fn exposed(text: &str) -> BTreeMap<String, String> {
    let types = text.lines().filter_map(|l| l.strip_prefix("# TYPE "));
    types
        .filter_map(|l| l.split_once(' '))
        .map(|(name, kind)| (name.to_string(), kind.to_string()))
        .collect()
}

#[test]
fn every_name_is_explained_and_every_explained_name_is_there() {
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/METRICS.md");
    let page = std::fs::read_to_string(page).expect("the page");
    let mut explained = BTreeMap::new();
    for line in page.lines().filter(|l| l.starts_with("| `")) {
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        let name = cells[1].trim_matches('`').to_string();
        assert_eq!(
            explained.insert(name, cells[2].to_string()),
            None,
            "{line} stands there twice"
        );
    }
    let server = Serving::start(&["--model", TINY, "--protections", "none,invariant,isolated"]);
    server.complete(&json!({"prompt": [1, 2], "max_tokens": 3, "ignore_eos": true}));
    let text = server.get("/metrics").body;
    assert_eq!(exposed(&text), explained);
    // The parsers of routers know these types only.
    assert!(
        explained
            .values()
            .all(|k| ["gauge", "counter", "histogram"].contains(&k.as_str()))
    );
    assert!(!text.contains("vllm:lora"), "{text}");
    assert!(text.ends_with("# EOF\n"));
    for line in text.lines().filter(|l| !l.starts_with('#')) {
        let name = line.split(['{', ' ']).next().expect("a name");
        let known = |n: &str| explained.contains_key(n);
        let bare = ["_total", "_bucket", "_sum", "_count"]
            .into_iter()
            .find_map(|end| name.strip_suffix(end));
        assert!(known(name) || bare.is_some_and(known), "{line}");
    }
}

#[test]
fn they_say_what_happened() {
    let folder = folder();
    let config = file(
        &folder,
        "c.toml",
        "rows = 2\nrow_widths = [16, 32]\ndecode_rows = 4\n",
    );
    let server = Serving::start(&[
        "--model",
        TINY,
        "--config",
        &config,
        "--protections",
        "none,rows,invariant",
    ]);
    for protection in ["invariant", "rows"] {
        let body = json!({"prompt": [1, 2, 3], "max_tokens": 5, "ignore_eos": true, "protection": protection, "n": 2});
        server.complete(&body);
    }
    let value = |name: &str| server.metric(name);
    assert_eq!(value("blocklock_promised{protection=\"none\"}"), 0.0);
    assert_eq!(value("blocklock_promised{protection=\"rows\"}"), 1.0);
    assert_eq!(value("blocklock_promised{protection=\"invariant\"}"), 1.0);
    assert_eq!(
        value("blocklock_geometries{protection=\"rows\",state=\"held\"}"),
        2.0
    );
    assert_eq!(
        value("blocklock_geometries{protection=\"rows\",state=\"broken\"}"),
        0.0
    );
    // 5 tokens in 5 steps, since a prompt's last row gives the first; the second choice may come a step later.
    let steps = value("blocklock_protection_steps_total{protection=\"invariant\"}");
    assert!([5.0, 6.0].contains(&steps), "{steps}");
    assert!(value("blocklock_protection_steps_total{protection=\"rows\"}") >= 5.0);
    assert_eq!(
        value("blocklock_protection_steps_total{protection=\"none\"}"),
        0.0
    );
    assert!(value("blocklock_launch_rows_total{protection=\"rows\",kind=\"padding\"}") > 0.0);
    assert_eq!(value("blocklock_time_to_first_token_seconds_count"), 4.0);
    assert_eq!(value("vllm:time_to_first_token_seconds_count"), 4.0);
    assert_eq!(value("blocklock_time_per_output_token_seconds_count"), 16.0);
    assert_eq!(value("blocklock_tokens_generated_total"), 20.0);
    assert_eq!(
        value("blocklock_http_requests_total{path=\"/v1/completions\",status=\"200\"}"),
        2.0
    );
    assert_eq!(value("blocklock_cache_hit_rate"), 0.0);

    // While something runs, and once nothing does.
    let context = server.get("/v1/models").json()["data"][0]["max_model_len"]
        .as_u64()
        .expect("a number");
    let long = json!({"prompt": [7, 8], "max_tokens": context - 2, "ignore_eos": true, "n": 4, "stream": true});
    let stream = server.send("POST", "/v1/completions", "", &long.to_string());
    server.wait_until("all four run", || value("vllm:num_requests_running") == 4.0);
    assert_eq!(value("blocklock_kv_blocks{state=\"used\"}").min(1.0), 1.0);
    for name in [
        "blocklock_kv_use",
        "vllm:kv_cache_usage_perc",
        "vllm:gpu_cache_usage_perc",
    ] {
        let part = value(name);
        assert!(0.0 < part && part <= 1.0, "{name} {part}");
    }
    drop(stream);
    server.wait_until("none does", || value("vllm:num_requests_running") == 0.0);
    assert_eq!(value("vllm:kv_cache_usage_perc"), 0.0);

    // A prefix is found again.
    let prompt: Vec<u32> = (0..130).collect();
    let body = json!({"prompt": prompt, "max_tokens": 1});
    server.complete(&body);
    server.complete(&body);
    assert_eq!(value("blocklock_cache_hits_total"), 1.0);
    assert_eq!(value("blocklock_tokens_cached_total"), 128.0);
    let rate = value("blocklock_cache_hit_rate");
    assert!(0.0 < rate && rate < 1.0, "{rate}");
}

#[test]
fn before_the_model_is_there_they_are_all_at_rest() {
    let server = Serving::slowly();
    assert_eq!(server.get("/health").status, 503);
    assert_eq!(server.metric("vllm:num_requests_waiting"), 0.0);
    assert_eq!(server.metric("blocklock_steps_total"), 0.0);
}
