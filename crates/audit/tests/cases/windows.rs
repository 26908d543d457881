//! Sliding windows under `invariant`: decode, prefill, chunks and cache give equal bits across window and chunk edges.

use crate::support::*;
use audit::Host;
use engine::{EngineConfig, Request};

/// Gemma's own window with wide heads (tiles of 64 keys) and narrow ones (of 128), and a window inside of one tile.
const MODELS: [(usize, usize); 3] = [(512, 256), (512, 32), (24, 32)];

/// Windows and chunks of attention meet at 512 positions.
const EDGES: [usize; 4] = [24, 64, 512, 1024];

/// A request whose answer starts `before` positions ahead of an edge and ends after it.
fn across(edge: usize, before: usize) -> Request {
    greedy(edge as u64, edge - before, before + 4)
}

fn each_model(mut test: impl FnMut(&Host, &str)) {
    for (window, head_dim) in MODELS {
        let host = windowed_host(window, head_dim);
        test(&host, &format!("window {window}, heads of {head_dim}"));
    }
}

#[test]
fn decoding_across_a_window_edge_equals_prefilling_up_to_every_position() {
    each_model(|host, model| {
        for edge in EDGES {
            let request = across(edge, 4);
            let decoded = solo(host, &request).trace;
            for n in 0..decoded.steps.len() {
                let mut longer = request.clone();
                longer
                    .prompt
                    .extend(decoded.steps[..n].iter().map(|s| s.token));
                longer.max_tokens = 1;
                let mut prefilled = solo(host, &longer).trace;
                let mut rest = decoded.clone();
                rest.steps = vec![decoded.steps[n].clone()];
                prefilled.finish.clone_from(&rest.finish);
                assert_same(
                    &rest,
                    &prefilled,
                    &format!("{model}, {} tokens", longer.prompt.len()),
                );
            }
        }
    });
}

#[test]
fn chunk_sizes_around_the_window_change_nothing() {
    each_model(|host, model| {
        let request = greedy(3, 1100, 3);
        let whole = solo(host, &request).trace;
        for chunk in [23, 24, 25, 63, 64, 65, 511, 512, 513] {
            let config = EngineConfig {
                chunk: Some(chunk),
                ..EngineConfig::default()
            };
            let chunked = alone(host, config, &request).trace;
            assert_same(&whole, &chunked, &format!("{model}, chunks of {chunk}"));
        }
    });
}

#[test]
fn cached_blocks_on_both_sides_of_a_window_edge_give_the_cold_bits() {
    each_model(|host, model| {
        for len in [511, 512, 513, 575, 577, 1025] {
            let request = greedy(4, len, 6);
            let cold = solo(host, &request).trace;
            let mut run = Run::new(host, EngineConfig::default());
            for tokens in [65, 449, 513, len] {
                let mut warm = request.clone();
                warm.prompt.truncate(tokens);
                run.submit(&warm);
                run.finish();
                let id = run.submit(&request);
                run.finish();
                assert!(run.trace(id).cached_tokens > 0);
                assert_same(
                    &cold,
                    run.trace(id),
                    &format!("{model}, {len} after {tokens}"),
                );
            }
        }
    });
}

#[test]
fn neighbours_across_their_own_edges_change_nothing() {
    each_model(|host, model| {
        let requests: Vec<Request> = EDGES.iter().map(|&edge| across(edge, 4)).collect();
        let cold: Vec<_> = requests.iter().map(|r| solo(host, r).trace).collect();
        let config = EngineConfig {
            chunk: Some(100),
            poison_freed: vec![f32::NAN],
            ..wide()
        };
        let crowd = together(host, config, &requests);
        for ((cold, warm), edge) in cold.iter().zip(&crowd).zip(EDGES) {
            assert_same(cold, warm, &format!("{model}, edge {edge}"));
        }
    });
}

/// The window is really there: what lies beyond it in every layer cannot reach a row, what lies inside can.
#[test]
fn what_no_layer_sees_changes_nothing() {
    use model::synthetic::Synthetic;
    let mut model = Synthetic::parse("tiny-gemma3@7")
        .expect("a known name")
        .config();
    assert_eq!(model.layers.len(), 3);
    // Three layers of 24 see back 3 · 23 positions.
    let sliding = model.layers[0];
    model.layers.fill(sliding);
    let weights = Synthetic::parse("tiny-gemma3@7")
        .expect("a known name")
        .weights();
    let host = host_of_parts(&model, &weights);
    let request = greedy(5, 200, 1);
    let whole = solo(&host, &request).trace;
    let mut changed = request.clone();
    changed.prompt[199 - 3 * 23 - 1] ^= 1;
    assert_same(&whole, &solo(&host, &changed).trace, "beyond");
    let mut changed = request;
    changed.prompt[199 - 3 * 23] ^= 1;
    let inside = solo(&host, &changed).trace;
    assert!(audit::compare(&whole, &inside).first.is_some());
}
