//! `--device hostile` and `hostile:rows`: everything runs there, and only what is promised holds.

use crate::bad_input::refused;
use crate::support::*;
use serde_json::Value;

/// Crowds of every protection on one of the devices; small rungs, so that targets lie in several of them.
fn crowds(device: &str, prompt: usize) {
    let folder = folder();
    let text =
        "rows = 3\nrow_widths = [16, 80]\ndecode_rows = 5\npack_totals = [24, 112]\nkv_part = 64\n";
    let config = file(&folder, "c.toml", text);
    let ids: Vec<String> = (0..prompt).map(|i| (i * 37 % 512).to_string()).collect();
    let ran = run(&[
        "check",
        "--device",
        device,
        "--model",
        TINY,
        "--config",
        &config,
        "--prompt-ids",
        &ids.join(","),
        "--protection",
        "none,isolated,rows,pack,invariant",
        "--crowds",
        "150",
        "--max-tokens",
        "8",
        "--neighbours",
        "9",
        "--longest",
        "129",
        "--json",
    ]);
    let report: Value = serde_json::from_str(&ran.out).expect("one JSON document");
    let protections = report["protections"].as_array().expect("a list");
    assert_eq!(protections.len(), 5);
    for p in protections {
        let diverged = p["diverged"].as_u64().expect("a number");
        assert_eq!((&p["trials"], &p["refused"]), (&150.into(), &0.into()));
        match p["name"] == "none" {
            true => assert!(diverged > 140, "{device}: none diverged in {diverged} only"),
            false => assert_eq!(
                diverged, 0,
                "{device}: {}: {}",
                p["name"], p["first_divergence"]
            ),
        }
    }
    assert_eq!(
        (&report["held"], ran.code),
        (&true.into(), 0),
        "{}",
        ran.err
    );
}

#[test]
fn all_but_none_hold_in_150_crowds_of_equal_rows() {
    crowds("hostile", 70);
}

#[test]
fn all_but_none_hold_in_150_crowds_where_every_row_has_an_order_of_its_own() {
    crowds("hostile:rows", 70);
}

fn generate(device: &str, protection: &str, n: &str) -> Value {
    let base = ["generate", "--model", TINY, "--prompt-ids", "1,2,3,4,5,6,7"];
    let more = ["--max-tokens", "6", "--json", "--n", n, "--device", device];
    json(&[&base[..], &more, &["--protection", protection]].concat())
}

#[test]
fn certificates_tell_the_two_devices_apart() {
    for (device, equivariant) in [("hostile", true), ("hostile:rows", false)] {
        for protection in ["isolated", "rows", "pack"] {
            let one = generate(device, protection, "1");
            let certificate = &one["geometry"]["certificate"];
            assert_eq!(certificate["broken_by"], Value::Null);
            // A pack carries one target anyway.
            let expected = equivariant && protection != "pack";
            assert_eq!(
                certificate["equivariant"], expected,
                "{device} {protection}"
            );
            for choice in generate(device, protection, "5")["choices"]
                .as_array()
                .expect("a list")
            {
                assert_eq!(
                    choice["steps"], one["choices"][0]["steps"],
                    "{device} {protection}"
                );
            }
        }
    }
}

#[test]
fn the_contract_s_bits_are_the_cpu_s_and_vendor_bits_are_not() {
    let steps =
        |device, protection| generate(device, protection, "1")["choices"][0]["steps"].clone();
    let cpu = steps("cpu", "invariant");
    for device in ["hostile", "hostile:rows"] {
        assert_eq!(steps(device, "invariant"), cpu, "{device}");
        assert_ne!(
            steps(device, "isolated"),
            steps("cpu", "isolated"),
            "{device}"
        );
    }
    assert_ne!(
        steps("hostile", "isolated"),
        steps("hostile:rows", "isolated")
    );
}

#[test]
fn what_the_devices_are_is_shown() {
    let inspect = |device: &str| json(&["inspect", "--model", TINY, "--json", "--device", device]);
    let (equal, own) = (inspect("hostile"), inspect("hostile:rows"));
    assert_eq!(
        (&equal["device"], &own["device"]),
        (&"hostile".into(), &"hostile:rows".into())
    );
    assert_eq!(equal["device_facts"]["vendor_row_index"], "no");
    assert_eq!(own["device_facts"]["vendor_row_index"], "yes");
    assert_ne!(equal["environment_id"], own["environment_id"]);
    let cpu = inspect("cpu");
    assert_ne!(equal["environment_id"], cpu["environment_id"]);
    assert_eq!(equal["numerics_id"], cpu["numerics_id"]);
    let available = |p: &Value| p["available"] == true;
    assert!(
        equal["protections"]
            .as_array()
            .expect("a list")
            .iter()
            .all(available)
    );

    let hopper = [
        "inspect",
        "--model",
        TINY,
        "--device",
        "hostile",
        "--profile",
        "hopper-bf16",
    ];
    refused(
        &hopper,
        &["--profile hopper-bf16: not on --device hostile; allowed there: ieee-f32"],
    );
    refused(
        &["selftest", "--device", "hostile:rows"],
        &["--device hostile:rows", "allowed: cpu"],
    );
    let bad = ["inspect", "--model", TINY, "--device", "hostile:2"];
    refused(&bad, &["'hostile:2'", "hostile, hostile:rows"]);
    let help = run(&["check", "--help"]).out;
    let words = help.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(
        words.contains("slow, on purpose-made worst vendor orders"),
        "{words}"
    );
    assert!(words.contains("proves planners, not speed"), "{words}");
}
