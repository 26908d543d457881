//! Reading what a user points at: prompts and other small texts, with the limits and messages they deserve.

use crate::args::PromptArgs;
use anyhow::{Result, bail};
use std::io::{IsTerminal, Read};
use std::path::Path;

/// Longest prompt text read, in bytes; far above any context.
const PROMPT_BYTES: u64 = 64 << 20;

/// A prompt as given.
#[derive(Debug, Clone, PartialEq)]
pub enum Prompt {
    /// Text.
    Text(String),
    /// Token ids.
    Ids(Vec<u32>),
}

/// The prompt the options name; `None` where they name none and standard input is a terminal.
pub fn prompt(args: &PromptArgs) -> Result<Option<Prompt>> {
    if let Some(ids) = &args.prompt_ids {
        return Ok(Some(Prompt::Ids(ids.clone())));
    }
    if let Some(text) = &args.prompt {
        return Ok(Some(Prompt::Text(text.clone())));
    }
    if let Some(path) = &args.prompt_file {
        return Ok(Some(Prompt::Text(read_text(path, PROMPT_BYTES)?)));
    }
    if std::io::stdin().is_terminal() {
        return Ok(None);
    }
    Ok(Some(Prompt::Text(read_text(Path::new("-"), PROMPT_BYTES)?)))
}

/// A UTF-8 text of at most `limit` bytes; "-" is standard input.
pub fn read_text(path: &Path, limit: u64) -> Result<String> {
    let mut bytes = Vec::new();
    let name = if path == Path::new("-") {
        std::io::stdin()
            .lock()
            .take(limit + 1)
            .read_to_end(&mut bytes)
            .map_err(|e| anyhow::anyhow!("cannot read standard input: {e}"))?;
        "standard input".to_string()
    } else {
        let name = path.display().to_string();
        if path.is_dir() {
            bail!("cannot read {name}: it is a directory, but a file is needed");
        }
        std::fs::File::open(path)
            .and_then(|f| f.take(limit + 1).read_to_end(&mut bytes))
            .map_err(|e| anyhow::anyhow!("cannot read {name}: {e}"))?;
        name
    };
    if bytes.len() as u64 > limit {
        bail!("{name} is longer than {limit} bytes, the limit");
    }
    String::from_utf8(bytes).map_err(|e| {
        anyhow::anyhow!(
            "{name} is not UTF-8: bad byte at offset {}; UTF-8 text is needed",
            e.utf8_error().valid_up_to()
        )
    })
}
