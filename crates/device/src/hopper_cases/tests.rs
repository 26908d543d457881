use super::*;
use crate::cpu::Isa;

#[test]
fn names_are_unique_and_inputs_repeat() {
    let list = all();
    let wide = sweep();
    let (tokens, gated, first) = (choices(), gated_products(), firsts());
    let all = list.iter().chain(&wide).chain(&tokens);
    let all = all.chain(&gated).chain(&first);
    let mut names: Vec<&str> = all.map(|n| n.name.as_str()).collect();
    names.sort_unstable();
    for pair in names.windows(2) {
        assert_ne!(pair[0], pair[1]);
    }
    let of = |c: &Case| format!("{c:?}");
    for named in list.iter().step_by(37) {
        assert_eq!(of(&named.case()), of(&named.case()), "{}", named.name);
    }
}

/// Cuts found by halves, as on a CPU, or by digits and integer sums, as on a GPU, leave the tokens that sorting leaves.
#[test]
fn tokens_chosen_without_sorting_are_those_of_the_reference() {
    let mut chosen = std::collections::BTreeSet::new();
    for named in choices() {
        let case = named.case();
        let want = case.run(&mut ScalarOps).unwrap();
        chosen.extend(want.chunks(2).map(|c| c[0]));
        for isa in Isa::ALL.into_iter().filter(|i| i.available()) {
            let got = case.run(&mut EmulationOps(isa)).unwrap();
            assert_eq!(got, want, "{} on {}", named.name, isa.name());
        }
        let Case::Choices(c) = &case else { continue };
        let want = ScalarOps.choose(c).unwrap();
        for ((z, ask), want) in c.z.chunks_exact(c.vocab).zip(&c.asks).zip(want) {
            let each = c.vocab.div_ceil(4096) | 1;
            let plain = ask.plain(c.vocab);
            for listed in [0, 256] {
                let got = want.and_then(|_| choose::choose(z, &plain, each, listed));
                assert_eq!(got, want.map(|w| w.0), "{}: {ask:?}", named.name);
            }
        }
    }
    assert!(chosen.len() > 500, "{}", chosen.len());
}

/// A product and its activation in one name their two operations' results.
#[test]
fn gated_products_are_products_and_activations_on_every_path() {
    for named in gated_products() {
        let case = named.case();
        let want = case.run(&mut ScalarOps).unwrap();
        for isa in Isa::ALL.into_iter().filter(|isa| isa.available()) {
            let got = case.run(&mut EmulationOps(isa)).unwrap();
            assert_eq!(got, want, "{} on {}", named.name, isa.name());
        }
    }
}

/// The first tokens in every order of logits are those that the order of ids and logits says.
#[test]
fn first_tokens_are_where_their_cases_put_them() {
    let find = |name: &str| firsts().into_iter().find(|n| n.name == name).unwrap();
    let run = |name: &str| find(name).case().run(&mut ScalarOps).unwrap();
    let ids = |row: &[u32]| row.iter().step_by(2).copied().collect::<Vec<_>>();
    let rows = |name: &str| run(name).chunks(40).map(ids).collect::<Vec<_>>();
    assert_eq!(
        rows("first tokens 2x60000 Ascending"),
        vec![(59_980..60_000).rev().collect::<Vec<_>>(); 2]
    );
    for order in ["Descending", "Equal", "Zero"] {
        let got = rows(&format!("first tokens 17x16897 {order}"));
        assert_eq!(got, vec![(0..20).collect::<Vec<_>>(); 17], "{order}");
    }
    let few = (0..20).map(|i| 49 + 50 * i).collect::<Vec<_>>();
    assert_eq!(rows("first tokens 2x3000 Few"), [few.clone(), few]);
    for vocab in [3000, 16_897] {
        let tokens = if vocab == 3000 { 2 } else { 17 };
        let got = run(&format!("first tokens {tokens}x{vocab} Nan"));
        assert_eq!(got, vec![u32::MAX; tokens]);
    }
    let got = run("first tokens 2x3000 NanRow");
    assert!(got.len() == 41 && got[40] == u32::MAX && got[0] < 3000);
}

/// The flavours do what they are for: results that are subnormal, infinite, NaN, zero, and ordinary.
#[test]
fn cases_reach_every_kind_of_result() {
    let (mut nan, mut infinite, mut zero, mut subnormal, mut normal) = (0, 0, 0, 0, 0);
    for named in all().iter().filter(|n| n.name.starts_with("linear")) {
        let case = named.case();
        if case.steps() > 100_000 {
            continue;
        }
        for bits in case.run(&mut ScalarOps).unwrap() {
            let x = f32::from_bits(bits);
            match x.classify() {
                std::num::FpCategory::Nan => nan += 1,
                std::num::FpCategory::Infinite => infinite += 1,
                std::num::FpCategory::Zero => zero += 1,
                std::num::FpCategory::Subnormal => subnormal += 1,
                std::num::FpCategory::Normal => normal += 1,
            }
        }
    }
    let all = [nan, infinite, zero, subnormal, normal];
    assert!(all.iter().all(|&n| n > 20), "{all:?}");
}

/// Digests recorded on a GPU (`blocklock selftest --device cuda --record FILE`), replayed without one.
fn replay(ops: &mut dyn HopperOps, what: &str) {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/golden/hopper.json");
    let Ok(text) = std::fs::read_to_string(path) else {
        println!("not run: no recorded digests (crates/device/golden/hopper.json)");
        return;
    };
    let file: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(file["numerics_version"], numerics::NUMERICS_VERSION);
    let recorded = file["cases"].as_object().unwrap();
    let list = all();
    assert_eq!(recorded.len(), list.len(), "cases recorded and cases now");
    for named in &list {
        let want = recorded.get(&named.name).and_then(|d| d.as_str());
        let got = digest(&named.case().run(ops).unwrap());
        assert_eq!(Some(got.as_str()), want, "{}, {what}", named.name);
    }
}

#[test]
fn digests_recorded_on_a_gpu_are_those_of_the_reference() {
    replay(&mut ScalarOps, "scalar reference");
}

#[test]
fn digests_recorded_on_a_gpu_are_those_of_the_emulation_on_every_path() {
    for isa in Isa::ALL.into_iter().filter(|i| i.available()) {
        replay(&mut EmulationOps(isa), isa.name());
    }
}
