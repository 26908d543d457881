//! How long targets wait, who pays for what a launch leaves empty, and what a certificate changes.

use super::harness::{asking, fake_engine, none, prompt, run};
use crate::certify::Certificate;
use crate::config::LockedConfig;
use crate::{Engine, EngineConfig, Event, Protection, Request};

fn engine(blocks: usize) -> Engine {
    let config = EngineConfig {
        token_budget: 32,
        max_running: 6,
        max_waiting: 10_000,
        locked: LockedConfig {
            rows: 3,
            widths: vec![16, 64],
            decode_rows: 4,
            totals: vec![32, 96],
            pack_share: 3,
            ..LockedConfig::default()
        },
        ..EngineConfig::default()
    };
    fake_engine(blocks, config).0
}

fn mixed(i: u64) -> Request {
    let protection = Protection::ALL[i as usize % 5];
    asking(
        prompt(i, 1 + (i as usize * 7) % 60),
        protection,
        1 + (i as usize * 5) % 12,
    )
}

/// Steps until `id` is admitted and until it ends, with `later` requests a step coming after it.
fn waits(protection: Protection, later: u64) -> (u64, u64) {
    let mut engine = engine(12);
    for i in 0..20 {
        engine.submit(mixed(i)).unwrap();
    }
    let id = engine
        .submit(asking(prompt(99, 50), protection, 8))
        .unwrap();
    let (mut admitted, mut ended) = (None, None);
    for step in 0..3000 {
        for i in 0..later {
            engine.submit(mixed(1000 + step * later + i)).unwrap();
        }
        for (of, event) in engine.step().unwrap() {
            match event {
                Event::Admitted { .. } if of == id => admitted = admitted.or(Some(step)),
                Event::Finished { .. } if of == id => ended = Some(step),
                _ => {}
            }
        }
        if let (Some(a), Some(e)) = (admitted, ended) {
            let stats = engine.stats().of(protection);
            assert!(stats.longest_wait_steps >= a);
            assert!(stats.waited_steps >= stats.longest_wait_steps);
            return (a, e);
        }
    }
    panic!("{protection} had not ended after 3000 steps");
}

#[test]
fn nobody_who_comes_later_delays_an_admission() {
    for protection in Protection::ALL {
        let (quiet, quiet_end) = waits(protection, 0);
        let (crowded, crowded_end) = waits(protection, 2);
        assert!(
            quiet > 0,
            "{protection} did not have to wait, so this shows nothing"
        );
        assert_eq!(quiet, crowded, "{protection}");
        // Later prompts share its steps; they never keep it from running.
        assert!(
            crowded_end - crowded <= 4 * (quiet_end - quiet),
            "{protection}: {crowded_end}"
        );
    }
}

#[test]
fn waiting_is_counted_once_in_steps() {
    let mut engine = engine(100);
    for i in 0..6 {
        engine.submit(none(i, 1, 5)).unwrap();
    }
    let late = engine.submit(none(7, 1, 1)).unwrap();
    let mut admitted = 0;
    for step in 1.. {
        let events = engine.step().unwrap();
        if events
            .iter()
            .any(|(id, e)| *id == late && matches!(e, Event::Admitted { .. }))
        {
            admitted = step;
            break;
        }
    }
    let stats = engine.stats().of(Protection::None);
    assert_eq!((stats.admitted, stats.waited_steps), (7, admitted - 1));
    assert_eq!(stats.longest_wait_steps, admitted - 1);
    assert_eq!(engine.stats().of(Protection::Rows), Default::default());
}

#[test]
fn an_empty_row_is_counted_and_a_full_one_too() {
    let mut engine = self::engine(100);
    engine
        .submit(asking(prompt(1, 10), Protection::Rows, 3))
        .unwrap();
    run(&mut engine);
    // Alone: 3 rows of 16 for a prompt of 10, then 2 steps of 4 rows.
    let alone = engine.stats().of(Protection::Rows);
    assert_eq!((alone.launched_rows, alone.filled_rows), (48 + 8, 10 + 2));
    engine
        .submit(asking(prompt(1, 16), Protection::Rows, 3))
        .unwrap();
    for i in 0..2 {
        engine.submit(none(i, 16, 3)).unwrap();
    }
    run(&mut engine);
    let full = engine.stats().of(Protection::Rows);
    assert_eq!(full.launched_rows - alone.launched_rows, 56);
    assert_eq!(full.filled_rows - alone.filled_rows, 48 + 2 * 3);
    assert_eq!(
        engine.stats().of(Protection::None).launched_rows,
        0,
        "all of them rode"
    );
}

#[test]
fn an_adopted_certificate_lets_targets_of_that_geometry_share() {
    let launches = |adopt: &[&str]| {
        let mut engine = self::engine(100);
        for geometry in adopt {
            engine.adopt(&Certificate {
                protection: "rows".into(),
                geometry: geometry.to_string(),
                broken_by: None,
                equivariant: true,
            });
        }
        for i in 0..3 {
            engine
                .submit(asking(prompt(i, 10), Protection::Rows, 1))
                .unwrap();
        }
        run(&mut engine);
        engine.stats().of(Protection::Rows).launched_rows / 48
    };
    assert_eq!(launches(&[]), 3);
    assert_eq!(
        launches(&["prefill 3x64, decode 4 rows"]),
        3,
        "another geometry"
    );
    assert_eq!(launches(&["prefill 3x16, decode 4 rows"]), 1);
}
