//! Threads and kernel paths.

use crate::support::*;
use device::cpu::Isa;
use engine::Request;

/// Requests that reach every kernel: one row, few rows, a prefill, long keys.
fn workload() -> Vec<Request> {
    vec![
        greedy(1, 1, 30),
        greedy(2, 300, 30),
        seeded(greedy(3, 65, 30), 9),
        greedy(4, 530, 10),
    ]
}

#[test]
fn one_two_and_more_threads_give_the_same_bits() {
    let baseline = together(&host_with(1, None, 100), wide(), &workload());
    for threads in [2, 3, 5] {
        let traces = together(&host_with(threads, None, 100), wide(), &workload());
        for (i, (a, b)) in baseline.iter().zip(&traces).enumerate() {
            assert_same(a, b, &format!("{threads} threads, request {i}"));
        }
    }
}

#[test]
fn every_kernel_path_of_this_machine_gives_the_same_bits() {
    let baseline = together(&host_with(2, Some(Isa::Portable), 100), wide(), &workload());
    for isa in Isa::ALL {
        if !isa.available() {
            println!(
                "not run: {}: this machine cannot run that kernel path",
                isa.name()
            );
            continue;
        }
        let traces = together(&host_with(2, Some(isa), 100), wide(), &workload());
        for (i, (a, b)) in baseline.iter().zip(&traces).enumerate() {
            assert_same(a, b, &format!("{}, request {i}", isa.name()));
        }
    }
}
