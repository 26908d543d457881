//! What the assembler says about each kernel: registers, spills, shared memory.

/// One kernel's use of a multiprocessor.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Resources {
    /// The kernel's symbol.
    pub entry: String,
    /// Registers a thread, at the start.
    pub registers: u32,
    /// Bytes stored to and loaded from memory because registers ran out.
    pub spills: u32,
    /// Bytes of local memory a thread.
    pub stack: u32,
    /// Static shared memory a block, bytes.
    pub shared: u32,
}

/// Reads `--ptxas-options=-v`'s lines out of a compiler's log. Kernels without a complete report are left out.
pub fn parse(log: &str) -> Vec<Resources> {
    let mut kernels: Vec<Resources> = Vec::new();
    let mut open: Option<Resources> = None;
    for line in log.lines() {
        if let Some(rest) = line.split("Compiling entry function '").nth(1) {
            open = Some(Resources {
                entry: rest.split('\'').next().unwrap_or_default().to_string(),
                ..Resources::default()
            });
        } else if let Some(kernel) = &mut open {
            if line.contains("bytes stack frame") {
                kernel.stack = before(line, " bytes stack frame");
                kernel.spills =
                    before(line, " bytes spill stores") + before(line, " bytes spill loads");
            } else if line.contains(" registers") {
                kernel.registers = before(line, " registers");
                kernel.shared = before(line, " bytes smem");
                kernels.extend(open.take());
            }
        }
    }
    kernels
}

/// The number that stands before `unit`, 0 where there is none.
fn before(line: &str, unit: &str) -> u32 {
    let Some(at) = line.find(unit) else {
        return 0;
    };
    let head = &line[..at];
    let start = head
        .rfind(|c: char| !c.is_ascii_digit())
        .map_or(0, |i| i + 1);
    head[start..].parse().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_assembler_s_report_is_read() {
        let log = "ptxas info    : 20 bytes gmem\n\
            ptxas info    : Compiling entry function 'first' for 'sm_90a'\n\
            ptxas info    : Function properties for first\n\
            ptxas         .     16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads\n\
            ptxas info    : Used 122 registers, used 1 barriers, 512 bytes smem\n\
            ptxas info    : Compile time = 463.636 ms\n\
            ptxas info    : Compiling entry function 'second' for 'sm_90a'\n\
            ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n\
            ptxas info    : Used 90 registers, used 1 barriers\n\
            ptxas info    : Compiling entry function 'cut off' for 'sm_90a'";
        let want = [("first", 122, 20, 16, 512), ("second", 90, 0, 0, 0)];
        let got = parse(log);
        assert_eq!(got.len(), want.len());
        for (got, want) in got.iter().zip(want) {
            let all = (
                got.entry.as_str(),
                got.registers,
                got.spills,
                got.stack,
                got.shared,
            );
            assert_eq!(all, want);
        }
        assert_eq!(parse(""), []);
    }
}
