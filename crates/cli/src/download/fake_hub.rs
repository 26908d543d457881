//! A hub of one model and the host of its large files, for tests.

use super::hex;
use super::hub::{Hub, HubName, Pulled};
use super::tests::{Answer, Seen, Server, settings};
use sha1::{Digest, Sha1};
use sha2::Sha256;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

pub(super) const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
pub(super) const TOKEN: &str = "hf_secret";

pub(super) type Files = Vec<(&'static str, Vec<u8>)>;

pub(super) fn large() -> Vec<u8> {
    (0..200_000u32)
        .map(|i| (i.wrapping_mul(i) >> 9) as u8)
        .collect()
}

pub(super) fn whole_model() -> Files {
    let small = |text: &str| text.as_bytes().to_vec();
    vec![
        (".gitattributes", small("*")),
        ("README.md", small("words")),
        ("config.json", small("{}")),
        ("tokenizer.json", small("{\"t\": 1}")),
        ("tokenizer_config.json", small("{\"c\": 1}")),
        ("chat_template.jinja", small("{{ x }}")),
        ("generation_config.json", small("{\"g\": 1}")),
        ("original/consolidated.safetensors", vec![1; 10]),
        ("model.safetensors", large()),
        ("model.gguf", vec![3; 99]),
    ]
}

/// What the hub calls content: large files by SHA-256, others as git does.
pub(super) fn etag(file: &str, content: &[u8]) -> String {
    match is_large(file) {
        true => hex(&Sha256::digest(content)),
        false => {
            let head = format!("blob {}\0", content.len()).into_bytes();
            hex(&Sha1::digest([&head, content].concat()))
        }
    }
}

pub(super) fn is_large(file: &str) -> bool {
    file.ends_with(".safetensors") || file.ends_with(".gguf")
}

pub(super) fn not_found() -> Answer {
    Answer::new("404 Not Found", "text/plain", "no")
}

/// An answer with the rest of a body, where one is asked for.
pub(super) fn ranged(request: &Seen, body: &[u8]) -> Answer {
    let mut answer = Answer::new("200 OK", "application/octet-stream", body);
    if let Some(range) = request.header("range") {
        let from: usize = range["bytes=".len()..]
            .trim_end_matches('-')
            .parse()
            .unwrap();
        answer.status = "206 Partial Content";
        answer.headers = format!(
            "Content-Range: bytes {from}-{}/{}\r\n",
            body.len() - 1,
            body.len()
        );
        answer.body.drain(..from);
    }
    answer
}

pub(super) fn listing(files: &Files) -> Answer {
    let siblings: Vec<_> = files
        .iter()
        .map(|(f, _)| serde_json::json!({"rfilename": f}))
        .collect();
    let page = serde_json::json!({"id": "o/n", "sha": COMMIT, "siblings": siblings});
    Answer::new("200 OK", "application/json", page.to_string())
}

/// A hub of one model, and the host its large files are on, which answers by `storage(request, body, requests before)`.
pub(super) struct Fake {
    pub hub: Server,
    pub storage: Server,
    pub home: TempDir,
}

impl Fake {
    pub fn new(files: Files) -> Self {
        Self::with(files, |request, body, _| ranged(request, body))
    }

    pub fn with(
        files: Files,
        answer: impl Fn(&Seen, &[u8], usize) -> Answer + Send + 'static,
    ) -> Self {
        let stored = files.clone();
        let storage = Server::start(move |request, before| {
            let file = request.path.trim_start_matches("/store/");
            match stored.iter().find(|(name, _)| *name == file) {
                Some((_, body)) => answer(request, body, before),
                None => not_found(),
            }
        });
        let address = storage.address.clone();
        let hub = Server::start(move |request, _| {
            let file = |start: String| request.path.strip_prefix(&start).map(str::to_owned);
            if file("/api/models/o/n/revision/".into()).is_some() {
                return listing(&files);
            }
            let asked = file(format!("/o/n/resolve/{COMMIT}/")).unwrap_or_default();
            let Some((name, body)) = files.iter().find(|(name, _)| *name == asked) else {
                return not_found();
            };
            let (etag, bytes) = (etag(name, body), body.len());
            let mut answer = ranged(request, body);
            answer.headers += &format!("ETag: \"{etag}\"\r\n");
            if is_large(name) {
                answer = Answer::new("302 Found", "text/plain", "elsewhere");
                answer.headers += &format!(
                    "Location: http://{address}/store/{name}\r\nX-Linked-Etag: \"{etag}\"\r\nX-Linked-Size: {bytes}\r\nETag: \"other\"\r\n"
                );
            }
            answer
        });
        let home = tempfile::tempdir().unwrap();
        Self { hub, storage, home }
    }

    pub fn hub(&self) -> Hub {
        hub_at(&self.hub.address, self.home.path(), &[("HF_TOKEN", TOKEN)])
    }

    pub fn pull(&self, name: &str) -> Result<Pulled, String> {
        pulled(&self.hub(), name)
    }

    pub fn folder(&self) -> PathBuf {
        self.home.path().join("hub/models--o--n")
    }

    pub fn blobs(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.folder().join("blobs")).unwrap();
        entries
            .map(|e| e.unwrap().file_name().into_string().unwrap())
            .collect()
    }
}

pub(super) fn hub_at(address: &str, home: &Path, more: &[(&str, &str)]) -> Hub {
    let endpoint = format!("http://{address}/");
    let variables = [
        ("HF_ENDPOINT", endpoint.as_str()),
        ("HF_HOME", home.to_str().unwrap()),
    ];
    let variable = |name: &str| {
        let found = variables
            .iter()
            .chain(more)
            .find(|(known, _)| *known == name)?;
        Some(found.1.to_owned())
    };
    Hub::read(&variable, settings(&[])).unwrap()
}

pub(super) fn pulled(hub: &Hub, name: &str) -> Result<Pulled, String> {
    let result = hub.pull(&HubName::parse(name).expect("a name"), false);
    result.map_err(|error| {
        let message = format!("{error:#}");
        assert!(
            !message.contains('\n') && !message.contains(TOKEN),
            "{message}"
        );
        message
    })
}
