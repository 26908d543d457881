//! Models of a hub that speaks Hugging Face's protocol: their files into that hub's usual cache, where other tools find
//! them and where theirs are found.
//!
//! Source: huggingface_hub's documentation, "Environment variables" and "Understand caching". A file lies in `blobs`
//! under the name the hub gives its content (`ETag`): the SHA-256 of a large file, git's SHA-1 of a small one. Folders in
//! `snapshots` link to blobs; a file in `refs` says which commit a branch was at.

use super::http::{Failure, get, get_through, with_retries};
use super::pip::Settings;
use super::url::Url;
use super::{bar, continues, copy, header, hex, receive};
use sha1::Sha1;
use sha2::{Digest, Sha256};
use std::collections::BTreeSet;
use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Read, Seek};
use std::path::{Component, Path, PathBuf};
use ureq::Body;
use ureq::http::Response;

const INDEX: &str = "model.safetensors.index.json";
const SINGLE: &str = "model.safetensors";

/// Most a model's listing may take.
const MAX_PAGE: u64 = 64 << 20;

/// Most hosts and pages one file is sought on.
const MAX_HOPS: usize = 8;

/// A model on a hub, as a user names it: `OWNER/NAME[@REVISION][:FILE.gguf]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HubName {
    /// `OWNER/NAME`.
    pub repo: String,
    /// Branch, tag or commit.
    pub revision: String,
    /// The one file meant, of several GGUF files.
    pub file: Option<String>,
}

impl HubName {
    /// Splits a name; `None` where it is none, such as a path to a file.
    pub fn parse(given: &str) -> Option<Self> {
        let (rest, file) = match given.split_once(':') {
            Some((rest, file)) => (rest, Some(file.to_owned())),
            None => (given, None),
        };
        let (repo, revision) = rest.split_once('@').unwrap_or((rest, "main"));
        let (owner, name) = repo.split_once('/')?;
        let part = |p: &str| {
            let plain = |b: u8| b.is_ascii_alphanumeric() || b"-_.".contains(&b);
            !p.is_empty() && !p.starts_with('.') && p.bytes().all(plain)
        };
        let ends = [".gguf", ".safetensors", ".json"];
        let is_file = ends.iter().any(|end| repo.ends_with(end));
        let gguf = file
            .as_deref()
            .is_none_or(|f| f.ends_with(".gguf") && is_plain(f));
        (part(owner) && part(name) && !is_file && is_plain(revision) && gguf).then(|| Self {
            repo: repo.to_owned(),
            revision: revision.to_owned(),
            file,
        })
    }
}

/// Whether a path from elsewhere stays below the folder it is joined to.
fn is_plain(path: &str) -> bool {
    let mut parts = Path::new(path).components();
    let plain = |c: Component| matches!(c, Component::Normal(_));
    !path.is_empty() && !path.contains(['\\', '\0', ':']) && parts.all(plain)
}

/// Where a hub is, who asks, and where its files are kept.
#[derive(Debug, Clone)]
pub struct Hub {
    endpoint: String,
    token: Option<String>,
    offline: bool,
    cache: PathBuf,
    web: Settings,
}

/// What a fetch brought.
#[derive(Debug)]
pub struct Pulled {
    /// Directory or GGUF file.
    pub path: PathBuf,
    /// Commit.
    pub commit: String,
    /// Files the model needs.
    pub files: usize,
    /// How many of them were transferred.
    pub fetched: usize,
}

impl Hub {
    /// As this process's environment says.
    pub fn of_process() -> anyhow::Result<Self> {
        Self::read(&|name| std::env::var(name).ok(), Settings::of_process())
    }

    /// As these variables say; proxies and certificates are pip's.
    pub fn read(variable: &dyn Fn(&str) -> Option<String>, web: Settings) -> anyhow::Result<Self> {
        let set = |name: &str| variable(name).filter(|value| !value.trim().is_empty());
        let path = |name: &str| set(name).map(PathBuf::from);
        let home = path("HF_HOME")
            .or_else(|| Some(path("XDG_CACHE_HOME")?.join("huggingface")))
            .or_else(|| Some(path("HOME")?.join(".cache/huggingface")))
            .ok_or_else(|| anyhow::anyhow!("no home folder to keep a cache in; set HF_HOME"))?;
        let token = path("HF_TOKEN_PATH").unwrap_or_else(|| home.join("token"));
        let token = set("HF_TOKEN").or_else(|| std::fs::read_to_string(token).ok());
        let endpoint = set("HF_ENDPOINT").unwrap_or_else(|| "https://huggingface.co".into());
        let offline = set("HF_HUB_OFFLINE").map(|v| v.to_lowercase());
        Ok(Self {
            endpoint: endpoint.trim().trim_end_matches('/').to_owned(),
            token: token.map(|t| t.trim().to_owned()).filter(|t| !t.is_empty()),
            offline: matches!(offline.as_deref(), Some("1" | "true" | "yes" | "on")),
            cache: path("HF_HUB_CACHE").unwrap_or_else(|| home.join("hub")),
            web,
        })
    }

    fn folder(&self, name: &HubName) -> PathBuf {
        let flat = name.repo.replace('/', "--");
        self.cache.join(format!("models--{flat}"))
    }

    /// The model as it lies in the cache, if it is complete there. Asks nobody.
    pub fn cached(&self, name: &HubName) -> Option<PathBuf> {
        let folder = self.folder(name);
        let commit = match std::fs::read_to_string(folder.join("refs").join(&name.revision)) {
            Ok(commit) => commit.trim().to_owned(),
            Err(_) => name.revision.clone(),
        };
        let snapshot = folder.join("snapshots").join(&commit);
        let has = |file: &str| snapshot.join(file).is_file();
        if let Some(file) = &name.file {
            return has(file).then(|| snapshot.join(file));
        }
        if has("config.json") && has("tokenizer.json") {
            let shards = std::fs::read(snapshot.join(INDEX));
            let all = || {
                shards
                    .ok()
                    .and_then(|t| shards_of(&t))
                    .is_some_and(|s| s.iter().all(|f| has(f)))
            };
            return (has(SINGLE) || all()).then_some(snapshot);
        }
        None
    }

    /// Fetches what the model needs and the cache lacks. Errors are one line.
    pub fn pull(&self, name: &HubName, progress: bool) -> anyhow::Result<Pulled> {
        self.try_pull(name, progress)
            .map_err(|failure| anyhow::anyhow!(failure.message))
    }

    fn try_pull(&self, name: &HubName, progress: bool) -> Result<Pulled, Failure> {
        if self.offline {
            let repo = &name.repo;
            return Err(Failure::lasting(format!(
                "{repo} is not in the cache, and the hub is not asked: HF_HUB_OFFLINE is set"
            )));
        }
        let (commit, listed) = with_retries(|n| self.list(name, n))?;
        if progress {
            crate::output::note(&format!("fetching {} at commit {commit}", name.repo));
        }
        let has = |file: &str| listed.iter().any(|f| f == file);
        let folder = self.folder(name);
        let snapshot = folder.join("snapshots").join(&commit);
        let mut pulled = Pulled {
            path: snapshot.clone(),
            commit: commit.clone(),
            files: 0,
            fetched: 0,
        };
        let mut take = |file: &str| -> Result<(), Failure> {
            pulled.files += 1;
            if !snapshot.join(file).is_file() {
                self.file(name, &commit, file, progress)?;
                pulled.fetched += 1;
            }
            Ok(())
        };
        if let Some(file) = gguf(name, &listed)? {
            take(&file)?;
            pulled.path = snapshot.join(file);
        } else {
            for file in listed.iter().filter(|f| is_text(f)) {
                take(file)?;
            }
            if has(SINGLE) {
                take(SINGLE)?;
            } else {
                take(INDEX)?;
                let read = std::fs::read(snapshot.join(INDEX)).ok();
                let shards = read.and_then(|text| shards_of(&text)).ok_or_else(|| {
                    Failure::lasting(format!("{}: {INDEX} names no files", name.repo))
                })?;
                for shard in shards {
                    take(&shard)?;
                }
            }
        }
        if name.revision != commit {
            let path = folder.join("refs").join(&name.revision);
            write_new(&path, &commit).map_err(|e| self.cannot_write(&e, None))?;
        }
        Ok(pulled)
    }

    fn url(&self, path: &str) -> Result<Url, Failure> {
        let endpoint = Url::parse(&self.endpoint).ok_or_else(|| {
            let shown = super::url::masked(&self.endpoint);
            Failure::lasting(format!(
                "HF_ENDPOINT is {shown}, which is not an http(s) URL"
            ))
        })?;
        Ok(endpoint.below(path))
    }

    /// Headers for the hub itself; no other host is told the token.
    fn headers(&self) -> Vec<(&'static str, String)> {
        let mut headers = vec![("Accept-Encoding", "identity".to_owned())];
        let bearer = |token: &String| ("Authorization", format!("Bearer {token}"));
        headers.extend(self.token.iter().map(bearer));
        headers
    }

    /// The commit a revision is at, and its files.
    fn list(&self, name: &HubName, try_number: u32) -> Result<(String, Vec<String>), Failure> {
        let (repo, revision) = (&name.repo, encoded(&name.revision, b""));
        let url = self.url(&format!("api/models/{repo}/revision/{revision}"))?;
        let response = get(&self.web, &url, &self.headers(), try_number)
            .map_err(|failure| self.explained(name, failure))?;
        let mut text = Vec::new();
        let read = response
            .into_body()
            .into_reader()
            .take(MAX_PAGE)
            .read_to_end(&mut text);
        read.map_err(|e| Failure::passing(format!("cannot fetch {url}: {e}")))?;
        let page: serde_json::Value = serde_json::from_slice(&text)
            .map_err(|e| Failure::lasting(format!("{url} is not a model's listing: {e}")))?;
        let commit = page["sha"].as_str().unwrap_or_default();
        if commit.len() != 40 || !commit.bytes().all(|b| b.is_ascii_hexdigit()) {
            let message = format!("{url} is not a model's listing: it names no commit");
            return Err(Failure::lasting(message));
        }
        let files = page["siblings"].as_array().into_iter().flatten();
        let files = files.filter_map(|f| f["rfilename"].as_str().map(str::to_owned));
        Ok((commit.to_owned(), files.filter(|f| is_plain(f)).collect()))
    }

    /// The same failure with what a user can do about it.
    fn explained(&self, name: &HubName, failure: Failure) -> Failure {
        let HubName { repo, revision, .. } = name;
        let why = match failure.status {
            Some(401 | 403) if self.token.is_some() => {
                format!(
                    "the token may not read {repo}, its terms have not been accepted, or there is no such model"
                )
            }
            Some(401 | 403) => {
                format!("{repo} is private, gated or does not exist; HF_TOKEN can hold a token")
            }
            Some(404) => format!("there is no {repo} at revision {revision}"),
            _ => return failure,
        };
        let message = format!("{why} ({})", failure.message);
        Failure { message, ..failure }
    }

    /// Fetches one file and links it into its snapshot.
    fn file(
        &self,
        name: &HubName,
        commit: &str,
        file: &str,
        progress: bool,
    ) -> Result<(), Failure> {
        let folder = self.folder(name);
        let path = format!("{}/resolve/{commit}/{}", name.repo, encoded(file, b"/"));
        let url = self.url(&path)?;
        let blob = with_retries(|n| self.blob(name, &folder.join("blobs"), &url, progress, n))?;
        let link = folder.join("snapshots").join(commit).join(file);
        link_to(&blob, &link, &folder).map_err(|e| self.cannot_write(&e, None))
    }

    /// Brings a file's content into `blobs`, going on where an earlier call or try broke off.
    fn blob(
        &self,
        name: &HubName,
        blobs: &Path,
        url: &Url,
        progress: bool,
        try_number: u32,
    ) -> Result<PathBuf, Failure> {
        let found = self.locate(name, url, try_number)?;
        let (etag, bytes) = (found.etag, found.bytes);
        let cannot_write = |e: std::io::Error| self.cannot_write(&e, Some(bytes));
        let blob = blobs.join(&etag);
        if std::fs::metadata(&blob).is_ok_and(|m| m.len() == bytes) {
            return Ok(blob);
        }
        std::fs::create_dir_all(blobs).map_err(cannot_write)?;
        let partial = blobs.join(format!("{etag}.incomplete"));
        let mut options = OpenOptions::new();
        options.create(true).truncate(false).read(true).write(true);
        let mut out = options.open(&partial).map_err(cannot_write)?;
        if out.try_lock().is_err() {
            let message = format!(
                "another process is fetching {url} into {}",
                partial.display()
            );
            return Err(Failure::lasting(message));
        }
        let mut done = out.seek(std::io::SeekFrom::End(0)).map_err(cannot_write)?;
        if done > bytes {
            done = 0;
        }
        let bar = bar(progress, bytes);
        let complete = done == bytes && bytes > 0;
        if !complete {
            let mut response = found.response;
            if done > 0 {
                let range = ("Range", format!("bytes={done}-"));
                let headers: Vec<_> = found.headers.into_iter().chain([range]).collect();
                // A server that cannot go on there is asked for everything.
                match get(&self.web, &found.url, &headers, try_number) {
                    Ok(rest) if continues(&rest, done) => response = rest,
                    Err(failure) if failure.again => return Err(failure),
                    _ => done = 0,
                }
            }
            out.set_len(done).map_err(cannot_write)?;
            out.seek(std::io::SeekFrom::Start(done))
                .map_err(cannot_write)?;
            let given = receive(response, &mut out, done, bytes, &bar, url, &cannot_write)?;
            if given != bytes {
                // Whatever it is, no later call should go on from it.
                std::fs::remove_file(&partial).map_err(cannot_write)?;
                return Err(Failure::lasting(format!(
                    "{url} is not the announced file: it has {given} bytes, not {bytes}"
                )));
            }
        }
        bar.finish_and_clear();
        let digest = digest(&mut out, &etag, bytes).map_err(cannot_write)?;
        if let Some(digest) = digest.filter(|digest| *digest != etag) {
            std::fs::remove_file(&partial).map_err(cannot_write)?;
            return Err(Failure::lasting(format!(
                "{url} is not the announced file: its digest is {digest}, not {etag}"
            )));
        }
        out.sync_all().map_err(cannot_write)?;
        std::fs::rename(&partial, &blob).map_err(cannot_write)?;
        Ok(blob)
    }

    /// Asks for a file and follows redirects: the hub's own answers say what the file is, even where another host has it.
    fn locate(&self, name: &HubName, url: &Url, try_number: u32) -> Result<Found, Failure> {
        let (mut at, mut etag, mut bytes) = (url.clone(), None, None);
        for _ in 0..MAX_HOPS {
            let own = at.authority == url.authority && at.scheme == url.scheme;
            let headers = match own {
                true => self.headers(),
                false => vec![("Accept-Encoding", "identity".to_owned())],
            };
            let response =
                get_through(&self.web, &at, &headers, try_number, 0).map_err(|failure| {
                    match failure.status {
                        Some(404) => failure,
                        _ => self.explained(name, failure),
                    }
                })?;
            let length = |name: &str| header(&response, name).and_then(|v| v.parse::<u64>().ok());
            if own {
                etag = named(&response).or(etag);
                bytes = length("x-linked-size").or(bytes);
            }
            if response.status().is_redirection() {
                let to = header(&response, "location").and_then(|to| at.join(to));
                at = to.ok_or_else(|| Failure::lasting(format!("{at} redirects nowhere")))?;
                continue;
            }
            let bytes = bytes.or_else(|| length("content-length"));
            let (Some(etag), Some(bytes)) = (etag, bytes) else {
                let message = format!(
                    "{url}: the server does not say what the file is (ETag, Content-Length)"
                );
                return Err(Failure::lasting(message));
            };
            return Ok(Found {
                url: at,
                headers,
                etag,
                bytes,
                response,
            });
        }
        Err(Failure::lasting(format!("{url} redirects too often")))
    }

    fn cannot_write(&self, error: &std::io::Error, bytes: Option<u64>) -> Failure {
        let cache = self.cache.display();
        Failure::lasting(match (error.kind(), bytes) {
            (ErrorKind::StorageFull | ErrorKind::QuotaExceeded, Some(bytes)) => format!(
                "no space left in {cache}: the file takes {} MB; free some and pull again to go on, or set HF_HOME to another folder",
                bytes.div_ceil(1_000_000)
            ),
            _ => format!("cannot write to {cache}: {error}; set HF_HOME to another folder"),
        })
    }
}

/// A file the hub has: where it is, what was asked there, what it is, and an answer that begins with its first byte.
struct Found {
    url: Url,
    headers: Vec<(&'static str, String)>,
    etag: String,
    bytes: u64,
    response: Response<Body>,
}

/// What an answer calls its content: letters and digits, fit for a file's name.
fn named(response: &Response<Body>) -> Option<String> {
    let tag = header(response, "x-linked-etag").or_else(|| header(response, "etag"))?;
    let tag = tag.trim_start_matches("W/").trim_matches('"');
    let plain = |b: u8| b.is_ascii_alphanumeric() || b == b'-';
    (!tag.is_empty() && tag.len() <= 128 && tag.bytes().all(plain)).then(|| tag.to_owned())
}

/// The digest of a file by which its content may be named: SHA-256, or SHA-1 as git takes it.
fn digest(file: &mut File, etag: &str, bytes: u64) -> std::io::Result<Option<String>> {
    fn of<D: Digest>(file: &mut File, prefix: &str) -> std::io::Result<String> {
        let mut hash = D::new();
        hash.update(prefix);
        file.rewind()?;
        copy(file, |chunk| {
            hash.update(chunk);
            Ok(())
        })?;
        Ok(hex(&hash.finalize()))
    }
    match etag.len() {
        64 => of::<Sha256>(file, "").map(Some),
        40 => of::<Sha1>(file, &format!("blob {bytes}\0")).map(Some),
        _ => Ok(None),
    }
}

/// Which GGUF file to fetch: the one named, or the only one of a model without safetensors.
fn gguf(name: &HubName, listed: &[String]) -> Result<Option<String>, Failure> {
    let repo = &name.repo;
    let has = |file: &str| listed.iter().any(|f| f == file);
    let all: Vec<&str> = listed
        .iter()
        .map(String::as_str)
        .filter(|f| f.ends_with(".gguf"))
        .collect();
    let some = all[..all.len().min(8)].join(", ");
    match (&name.file, &all[..]) {
        (Some(file), _) if has(file) => Ok(Some(file.clone())),
        (Some(file), _) => Err(Failure::lasting(format!(
            "{repo} has no {file}; it has: {some}"
        ))),
        (None, _) if has("config.json") && (has(SINGLE) || has(INDEX)) => Ok(None),
        (None, [one]) => Ok(Some((*one).to_owned())),
        (None, []) => Err(Failure::lasting(format!(
            "{repo} has neither config.json with {SINGLE} or {INDEX} nor a GGUF file"
        ))),
        (None, _) => Err(Failure::lasting(format!(
            "{repo} has several GGUF files; name one, as {repo}:FILE: {some}"
        ))),
    }
}

/// Whether a model's configuration, tokenizer or template is in this file.
fn is_text(file: &str) -> bool {
    matches!(
        file,
        "config.json" | "tokenizer.json" | "tokenizer_config.json" | "generation_config.json"
    ) || (file.starts_with("chat_template.") && !file.contains('/'))
}

/// The files an index names; `None` where it is no index.
fn shards_of(text: &[u8]) -> Option<BTreeSet<String>> {
    let index: serde_json::Value = serde_json::from_slice(text).ok()?;
    let map = index.get("weight_map")?.as_object()?;
    let files: Option<BTreeSet<String>> = map
        .values()
        .map(|f| f.as_str().map(str::to_owned))
        .collect();
    files.filter(|files| !files.is_empty() && files.iter().all(|f| is_plain(f)))
}

/// Percent-encodes what is not plain in a URL's path, but for the bytes in `keep`.
fn encoded(text: &str, keep: &[u8]) -> String {
    let plain = |b: u8| b.is_ascii_alphanumeric() || b"-_.~".contains(&b) || keep.contains(&b);
    let one = |b: u8| {
        if plain(b) {
            char::from(b).to_string()
        } else {
            format!("%{b:02X}")
        }
    };
    text.bytes().map(one).collect()
}

/// Writes a small file at once or not at all.
fn write_new(path: &Path, text: &str) -> std::io::Result<()> {
    let folder = path.parent().unwrap_or(path);
    std::fs::create_dir_all(folder)?;
    let mut file = tempfile::NamedTempFile::new_in(folder)?;
    std::io::Write::write_all(&mut file, text.as_bytes())?;
    file.persist(path)?;
    Ok(())
}

/// Makes `link`, below `folder` as `blob` is, lead to `blob`.
fn link_to(blob: &Path, link: &Path, folder: &Path) -> std::io::Result<()> {
    let parent = link.parent().unwrap_or(folder);
    std::fs::create_dir_all(parent)?;
    // A link to a blob that was removed by hand.
    if link.is_symlink() {
        std::fs::remove_file(link)?;
    }
    #[cfg(unix)]
    {
        let ups = parent
            .strip_prefix(folder)
            .map_or(0, |p| p.components().count());
        let mut target: PathBuf = std::iter::repeat_n("..", ups).collect();
        target.push(blob.strip_prefix(folder).unwrap_or(blob));
        std::os::unix::fs::symlink(target, link)
    }
    #[cfg(not(unix))]
    std::fs::copy(blob, link).map(drop)
}
