//! `bench --kernels`: operations one by one, with what they move and compute.

use crate::output;
use device_cuda::OpTime;
use serde::Serialize;

/// An operation of a step.
#[derive(Debug, Clone, Serialize)]
pub struct Kernel {
    operation: &'static str,
    /// A step.
    calls: f64,
    /// A step.
    ms: f64,
    share: f64,
    /// What it must read and write, over its time.
    bytes_per_s: f64,
    /// Multiplications and additions of products and attention, over its time.
    operations_per_s: f64,
}

/// Of so many steps; none where the device does not count calls.
pub fn of(times: Option<(&[OpTime], usize)>) -> Vec<Kernel> {
    let Some((times, steps)) = times else {
        return Vec::new();
    };
    let steps = steps.max(1) as f64;
    let all: f64 = times.iter().map(|t| t.seconds).sum();
    let counted = times.iter().filter(|t| t.calls > 0);
    let kernel = |t: &OpTime| Kernel {
        operation: t.op,
        calls: t.calls as f64 / steps,
        ms: 1e3 * t.seconds / steps,
        share: t.seconds / all.max(1e-12),
        bytes_per_s: t.cost.bytes / t.seconds.max(1e-12),
        operations_per_s: t.cost.operations / t.seconds.max(1e-12),
    };
    counted.map(kernel).collect()
}

/// A table a step.
pub fn text<'a>(steps: impl Iterator<Item = (String, &'a [Kernel])>) -> String {
    let mut out = String::new();
    for (name, kernels) in steps {
        let ms: f64 = kernels.iter().map(|k| k.ms).sum();
        out += &format!("\n{name}, {ms:.3} ms of operations, each on its own\n");
        let head = ["operation", "calls", "ms", "share", "TB/s", "TFLOP/s"];
        let mut rows = vec![head.map(String::from).to_vec()];
        for k in kernels {
            rows.push(vec![
                k.operation.into(),
                format!("{:.0}", k.calls),
                format!("{:.3}", k.ms),
                format!("{:.1} %", 100.0 * k.share),
                format!("{:.2}", k.bytes_per_s / 1e12),
                format!("{:.1}", k.operations_per_s / 1e12),
            ]);
        }
        out += &output::table(&rows);
    }
    out
}
