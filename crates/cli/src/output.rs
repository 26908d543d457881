//! Writing results. Everything goes through `Write` with its errors kept: a closed pipe ends the program quietly.

use anyhow::{Context, Result};
use serde::Serialize;
use std::io::{ErrorKind, Write};

/// Whether an error is only that nobody reads our output any more.
pub fn is_closed_pipe(error: &anyhow::Error) -> bool {
    error.chain().any(|cause| {
        cause
            .downcast_ref::<std::io::Error>()
            .is_some_and(|e| e.kind() == ErrorKind::BrokenPipe)
    })
}

/// Prints text to standard output and flushes it.
pub fn print(text: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes())
        .and_then(|()| out.flush())
        .context("cannot write to standard output")
}

/// Prints one JSON document.
pub fn print_json(value: &impl Serialize) -> Result<()> {
    let text = serde_json::to_string_pretty(value).context("cannot write JSON")?;
    print(&format!("{text}\n"))
}

/// A line for people on standard error; lost where nobody reads it.
pub fn note(text: &str) {
    let _ = writeln!(std::io::stderr().lock(), "{text}");
}

/// The bits of a logit, as in every JSON output.
pub fn bits(x: f32) -> String {
    format!("{:#010x}", x.to_bits())
}

/// Bytes for people.
pub fn bytes(n: u64) -> String {
    match n {
        n if n >= 10 << 30 => format!("{:.1} GiB", n as f64 / (1u64 << 30) as f64),
        n if n >= 10 << 20 => format!("{:.0} MiB", n as f64 / (1u64 << 20) as f64),
        n if n >= 10 << 10 => format!("{:.0} KiB", n as f64 / 1024.0),
        n => format!("{n} B"),
    }
}

/// A whole number with thousands separated.
pub fn count(n: u64) -> String {
    let digits = n.to_string();
    let mut out = String::new();
    for (i, c) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(c);
    }
    out
}

/// Columns padded to equal width, the first to the left and the others to the right.
pub fn table(rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |c: usize| {
        rows.iter()
            .filter_map(|r| r.get(c))
            .map(|s| s.chars().count())
            .max()
            .unwrap_or(0)
    };
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let mut out = String::new();
    for row in rows {
        let cells: Vec<String> = row
            .iter()
            .enumerate()
            .map(|(c, cell)| match c {
                0 => format!("{cell:<w$}", w = widths[c]),
                _ => format!("{cell:>w$}", w = widths[c]),
            })
            .collect();
        out.push_str(cells.join("  ").trim_end());
        out.push('\n');
    }
    out
}

/// An error with its causes, each once: messages that already quote their cause are not followed by it.
pub fn in_full(error: &anyhow::Error) -> String {
    let mut text = error.to_string();
    for cause in error.chain().skip(1).map(ToString::to_string) {
        if !text.contains(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_for_people() {
        assert_eq!(count(134_515_008), "134,515,008");
        assert_eq!(count(12), "12");
        assert_eq!(bytes(98_362_432), "94 MiB");
        assert_eq!(bits(1.0), "0x3f800000");
    }

    #[test]
    fn tables_align() {
        let rows = [
            vec!["a".into(), "10".into()],
            vec!["long".into(), "5".into()],
        ];
        assert_eq!(table(&rows), "a     10\nlong   5\n");
    }

    #[test]
    fn each_cause_is_said_once() {
        let quoted = anyhow::anyhow!("inner").context("outer: inner");
        assert_eq!(super::in_full(&quoted), "outer: inner");
        let apart = anyhow::anyhow!("inner").context("outer");
        assert_eq!(super::in_full(&apart), "outer: inner");
    }
}
