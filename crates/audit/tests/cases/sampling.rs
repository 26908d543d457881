//! Seeds.

use crate::support::*;
use engine::Request;

#[test]
fn a_seed_counts_whatever_the_neighbours_have() {
    let host = host();
    let target = seeded(greedy(1, 33, 40), 42);
    let alone = solo(&host, &target).trace;
    let unseeded = |i: u64| seeded(greedy(i, 10 + i as usize, 40), 0);
    let neighbours: [Vec<Request>; 4] = [
        (0..9).map(|i| greedy(i, 20, 40)).collect(),
        (0..9).map(unseeded).collect(),
        (0..9).map(|i| seeded(greedy(i, 20, 40), i)).collect(),
        (0..9)
            .map(|i| {
                if i % 2 == 0 {
                    greedy(i, 5, 40)
                } else {
                    seeded(greedy(1, 33, 40), i)
                }
            })
            .collect(),
    ];
    for (kind, others) in neighbours.iter().enumerate() {
        for place in [0, 4, 9] {
            let mut all = others.clone();
            all.insert(place, target.clone());
            assert_same(
                &alone,
                &together(&host, wide(), &all)[place],
                &format!("kind {kind}, place {place}"),
            );
        }
    }
}

#[test]
fn four_seeds_keep_their_answers_in_every_order() {
    let host = host();
    let requests: Vec<Request> = (0..4).map(|s| seeded(greedy(2, 21, 40), s)).collect();
    let alone: Vec<_> = requests.iter().map(|r| solo(&host, r).trace).collect();
    for code in 0..24 {
        let order = order(4, code);
        let all: Vec<Request> = order.iter().map(|&i| requests[i].clone()).collect();
        for (trace, &i) in together(&host, wide(), &all).iter().zip(&order) {
            assert_same(&alone[i], trace, &format!("order {order:?}, seed {i}"));
        }
    }
}

#[test]
fn distinct_seeds_and_distinct_choices_give_distinct_answers() {
    let host = host();
    let mut requests: Vec<Request> = (0..16).map(|s| seeded(greedy(3, 12, 40), s)).collect();
    for choice in 1..4 {
        let mut request = requests[0].clone();
        request.sampling.choice = choice;
        requests.push(request);
    }
    let answers: Vec<Vec<u32>> = together(&host, wide(), &requests)
        .iter()
        .map(|t| t.steps.iter().map(|s| s.token).collect())
        .collect();
    for i in 0..answers.len() {
        for j in 0..i {
            assert_ne!(answers[i], answers[j], "{i} and {j}");
        }
    }
}
