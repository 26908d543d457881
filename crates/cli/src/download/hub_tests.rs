//! The hub's protocol against servers of this process: layout of the cache, resuming, refusals.

use super::fake_hub::*;
use super::http::TRIES;
use super::hub::HubName;
use super::tests::{Answer, Seen, Server};
use std::path::Path;

#[test]
fn names_are_told_from_paths() {
    let parts = |given: &str| {
        let name = HubName::parse(given)?;
        Some((name.repo, name.revision, name.file))
    };
    let some = |repo: &str, revision: &str, file: Option<&str>| {
        Some((
            repo.to_owned(),
            revision.to_owned(),
            file.map(str::to_owned),
        ))
    };
    assert_eq!(parts("o/n"), some("o/n", "main", None));
    assert_eq!(parts("o/n-1.5_b@v1.0"), some("o/n-1.5_b", "v1.0", None));
    assert_eq!(
        parts("o/n@refs/pr/1:a/b-Q4.gguf"),
        some("o/n", "refs/pr/1", Some("a/b-Q4.gguf"))
    );
    for path in [
        "",
        "n",
        "/n",
        "o/",
        "./n",
        "../n",
        "a/b/c",
        "o/n.gguf",
        "o/n.safetensors",
        "o/n@",
        "o/n@../x",
        "o/n:x.bin",
        "o/n:../x.gguf",
        "o/n:/x.gguf",
        "o/n:",
        "o/.n",
        "ö/n",
        "http://o/n",
        "synthetic:a/b",
    ] {
        assert_eq!(parts(path), None, "{path}");
    }
}

#[test]
fn a_model_lies_in_the_cache_as_other_tools_lay_it() {
    let fake = Fake::new(whole_model());
    let name = HubName::parse("o/n").unwrap();
    assert_eq!(fake.hub().cached(&name), None);
    let pulled = fake.pull("o/n").unwrap();
    assert_eq!(
        (pulled.files, pulled.fetched, pulled.commit.as_str()),
        (6, 6, COMMIT)
    );
    let snapshot = fake.folder().join("snapshots").join(COMMIT);
    assert_eq!(pulled.path, snapshot);
    let mut names: Vec<_> = std::fs::read_dir(&snapshot)
        .unwrap()
        .map(|e| e.unwrap().file_name())
        .collect();
    names.sort();
    assert_eq!(
        names,
        [
            "chat_template.jinja",
            "config.json",
            "generation_config.json",
            "model.safetensors",
            "tokenizer.json",
            "tokenizer_config.json"
        ]
    );
    assert_eq!(
        std::fs::read(snapshot.join("model.safetensors")).unwrap(),
        large()
    );
    #[cfg(unix)]
    assert_eq!(
        std::fs::read_link(snapshot.join("config.json")).unwrap(),
        Path::new("../../blobs").join(etag("config.json", b"{}"))
    );
    assert_eq!(
        std::fs::read_to_string(fake.folder().join("refs/main")).unwrap(),
        COMMIT
    );
    assert_eq!(fake.blobs().len(), 6);

    // The token is for the hub alone.
    let bearer = format!("Bearer {TOKEN}");
    assert!(
        fake.hub
            .seen()
            .iter()
            .all(|r| r.header("authorization") == Some(&bearer))
    );
    let stored = fake.storage.seen();
    assert_eq!(stored.len(), 1);
    assert_eq!(stored[0].header("authorization"), None);

    // What is there is used without asking, and not transferred again.
    let asked = fake.hub.seen().len();
    assert_eq!(fake.hub().cached(&name), Some(snapshot.clone()));
    let pinned = HubName::parse(&format!("o/n@{COMMIT}")).unwrap();
    assert_eq!(fake.hub().cached(&pinned), Some(snapshot.clone()));
    assert_eq!(
        fake.hub().cached(&HubName::parse("o/n@other").unwrap()),
        None
    );
    assert_eq!(fake.hub.seen().len(), asked);
    assert_eq!(fake.pull("o/n").unwrap().fetched, 0);
    assert_eq!(fake.hub.seen().len(), asked + 1);

    std::fs::remove_file(
        fake.folder()
            .join("blobs")
            .join(etag("tokenizer.json", b"{\"t\": 1}")),
    )
    .unwrap();
    assert_eq!(fake.hub().cached(&name), None);
    assert_eq!(fake.pull("o/n").unwrap().fetched, 1);
    assert_eq!(fake.hub().cached(&name), Some(snapshot));
}

#[test]
fn revisions_are_asked_for_as_named() {
    let fake = Fake::new(whole_model());
    fake.pull("o/n@refs/pr/1").unwrap();
    fake.pull(&format!("o/n@{COMMIT}")).unwrap();
    let seen = fake.hub.seen();
    assert_eq!(seen[0].path, "/api/models/o/n/revision/refs%2Fpr%2F1");
    assert_eq!(
        seen.last().unwrap().path,
        format!("/api/models/o/n/revision/{COMMIT}")
    );
    assert_eq!(
        std::fs::read_to_string(fake.folder().join("refs/refs/pr/1")).unwrap(),
        COMMIT
    );
    assert!(!fake.folder().join("refs").join(COMMIT).exists());
}

#[test]
fn shards_follow_the_index_and_a_gguf_file_its_name() {
    let mut files = whole_model();
    files.retain(|(name, _)| *name != "model.safetensors" && *name != "model.gguf");
    let index = r#"{"weight_map": {"a": "s-1.safetensors", "b": "s-2.safetensors", "c": "s-1.safetensors"}}"#;
    files.push(("model.safetensors.index.json", index.into()));
    files.extend([
        ("s-1.safetensors", large()),
        ("s-2.safetensors", vec![5; 7]),
        ("s-3.safetensors", vec![6; 7]),
    ]);
    let fake = Fake::new(files.clone());
    let pulled = fake.pull("o/n").unwrap();
    assert_eq!(pulled.files, 8);
    assert!(
        pulled.path.join("s-2.safetensors").is_file()
            && !pulled.path.join("s-3.safetensors").exists()
    );
    assert_eq!(
        fake.hub().cached(&HubName::parse("o/n").unwrap()),
        Some(pulled.path.clone())
    );
    std::fs::remove_file(pulled.path.join("s-1.safetensors")).unwrap();
    assert_eq!(fake.hub().cached(&HubName::parse("o/n").unwrap()), None);

    let one: Files = vec![("README.md", vec![]), ("q/model Q4.gguf", large())];
    let fake = Fake::with(one, |request, body, _| ranged(request, body));
    let message = fake.pull("o/n").unwrap_err();
    assert!(
        message.contains("not found"),
        "an unencoded name is not that of the file: {message}"
    );
    assert!(
        fake.hub
            .seen()
            .last()
            .unwrap()
            .path
            .ends_with("/q/model%20Q4.gguf")
    );

    let fake = Fake::new(vec![("q/a.gguf", large()), ("q/b.gguf", vec![1])]);
    assert!(
        fake.pull("o/n")
            .unwrap_err()
            .ends_with("name one, as o/n:FILE: q/a.gguf, q/b.gguf")
    );
    assert_eq!(
        fake.pull("o/n:c.gguf").unwrap_err(),
        "o/n has no c.gguf; it has: q/a.gguf, q/b.gguf"
    );
    let pulled = fake.pull("o/n:q/a.gguf").unwrap();
    assert_eq!(std::fs::read(&pulled.path).unwrap(), large());
    assert_eq!(
        fake.hub().cached(&HubName::parse("o/n:q/a.gguf").unwrap()),
        Some(pulled.path)
    );

    let fake = Fake::new(vec![("config.json", vec![])]);
    assert!(fake.pull("o/n").unwrap_err().starts_with("o/n has neither"));
}

#[test]
fn a_broken_transfer_goes_on_in_this_call_and_in_the_next() {
    let cut = |at: usize| {
        move |request: &Seen, body: &[u8], _: usize| {
            let mut answer = ranged(request, body);
            answer.cut = Some(at.min(answer.body.len()));
            answer
        }
    };
    // Every connection brings 90,000 bytes of 200,000: three tries are enough.
    let fake = Fake::with(whole_model(), cut(90_000));
    fake.pull("o/n").unwrap();
    let ranges: Vec<_> = fake
        .storage
        .seen()
        .iter()
        .filter_map(|r| r.header("range").map(str::to_owned))
        .collect();
    assert_eq!(ranges, ["bytes=90000-", "bytes=180000-"]);

    // Of 50,000 they are not, but the next call goes on.
    let fake = Fake::with(whole_model(), cut(50_000));
    let message = fake.pull("o/n").unwrap_err();
    assert!(
        message.contains("broke off after 150000 of 200000")
            && message.contains(&format!("({TRIES} tries)")),
        "{message}"
    );
    assert!(!fake.folder().join("refs/main").exists());
    assert!(fake.blobs().iter().any(|b| b.ends_with(".incomplete")));
    let pulled = fake.pull("o/n").unwrap();
    assert_eq!(pulled.fetched, 1);
    assert_eq!(
        std::fs::read(pulled.path.join("model.safetensors")).unwrap(),
        large()
    );
    assert!(fake.blobs().iter().all(|b| !b.ends_with(".incomplete")));

    // A host that cannot go on is asked for everything.
    let fake = Fake::with(whole_model(), |_, body, before| {
        let mut answer = Answer::new("200 OK", "application/octet-stream", body);
        answer.cut = (before == 0).then_some(1000);
        answer
    });
    let pulled = fake.pull("o/n").unwrap();
    assert_eq!(
        std::fs::read(pulled.path.join("model.safetensors")).unwrap(),
        large()
    );
}

#[test]
fn what_is_not_the_announced_file_is_refused_and_forgotten() {
    let damaged = |_: &Seen, body: &[u8], _: usize| {
        let mut body = body.to_vec();
        body[100] ^= 1;
        Answer::new("200 OK", "application/octet-stream", body)
    };
    let longer =
        |_: &Seen, body: &[u8], _: usize| Answer::new("200 OK", "a/b", [body, b"x"].concat());
    let fake = Fake::with(whole_model(), damaged);
    let expected = etag("model.safetensors", &large());
    let message = fake.pull("o/n").unwrap_err();
    assert!(
        message.contains("its digest is") && message.ends_with(&format!("not {expected}")),
        "{message}"
    );
    assert!(
        fake.blobs().iter().all(|b| !b.starts_with(&expected)),
        "{:?}",
        fake.blobs()
    );
    let fake = Fake::with(whole_model(), longer);
    let message = fake.pull("o/n").unwrap_err();
    assert!(
        message.ends_with("it has 200001 bytes, not 200000"),
        "{message}"
    );
    assert!(
        fake.blobs().iter().all(|b| !b.starts_with(&expected)),
        "{:?}",
        fake.blobs()
    );

    // A small file, named as git names it.
    let answers = |headers: &'static str| {
        let home = tempfile::tempdir().unwrap();
        let server = Server::start(move |request, _| {
            if request.path.starts_with("/api") {
                return listing(&vec![
                    ("config.json", vec![]),
                    ("model.safetensors", vec![]),
                ]);
            }
            let mut answer = Answer::new("200 OK", "text/plain", "{}");
            answer.headers += headers;
            answer
        });
        pulled(&hub_at(&server.address, home.path(), &[]), "o/n").unwrap_err()
    };
    let wrong = "ETag: \"aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa\"\r\n";
    let git = etag("config.json", b"{}");
    assert!(
        answers(wrong).contains(&format!("its digest is {git}")),
        "{}",
        answers(wrong)
    );
    for nameless in ["", "ETag: \"../../x\"\r\n", "ETag: \"\"\r\n"] {
        assert!(
            answers(nameless).contains("does not say what the file is"),
            "{}",
            answers(nameless)
        );
    }
}

#[test]
fn refusals_say_what_to_do() {
    let home = tempfile::tempdir().unwrap();
    let says = |status: &'static str, more: &[(&str, &str)], name: &str| {
        let server = Server::start(move |_, _| Answer::new(status, "text/html", "<html>"));
        (
            pulled(&hub_at(&server.address, home.path(), more), name).unwrap_err(),
            server.seen().len(),
        )
    };
    let (message, asked) = says("401 Unauthorized", &[], "o/n");
    assert!(
        message.starts_with("o/n is private, gated or does not exist; HF_TOKEN")
            && message.contains("401"),
        "{message}"
    );
    assert_eq!(asked, 1);
    let (message, _) = says("403 Forbidden", &[("HF_TOKEN", TOKEN)], "o/n");
    assert!(
        message.starts_with("the token may not read o/n") && message.contains("403"),
        "{message}"
    );
    let (message, asked) = says("404 Not Found", &[], "o/n@v9");
    assert!(
        message.starts_with("there is no o/n at revision v9") && message.contains("404"),
        "{message}"
    );
    assert_eq!(asked, 1);
    let (message, asked) = says("503 Busy", &[], "o/n");
    assert!(message.contains("503"), "{message}");
    assert_eq!(asked, TRIES as usize);
    assert!(
        says("200 OK", &[], "o/n")
            .0
            .contains("is not a model's listing")
    );
    let (message, asked) = says("200 OK", &[("HF_HUB_OFFLINE", "1")], "o/n");
    assert_eq!(
        (message.as_str(), asked),
        (
            "o/n is not in the cache, and the hub is not asked: HF_HUB_OFFLINE is set",
            0
        )
    );
    let bad = pulled(&hub_at("", home.path(), &[]), "o/n").unwrap_err();
    assert!(bad.contains("HF_ENDPOINT"), "{bad}");
    assert_eq!(
        std::fs::read_dir(home.path()).unwrap().count(),
        0,
        "nothing is written for a refusal"
    );

    let looping = Server::start(|request, _| {
        if request.path.starts_with("/api") {
            return listing(&whole_model());
        }
        let mut answer = Answer::new("307 Again", "text/plain", "");
        answer.headers += "Location: again\r\n";
        answer
    });
    let message = pulled(&hub_at(&looping.address, home.path(), &[]), "o/n").unwrap_err();
    assert!(message.ends_with("redirects too often"), "{message}");
}

#[test]
fn a_listing_cannot_lead_out_of_the_cache() {
    let files: Files = vec![
        ("config.json", b"{}".to_vec()),
        ("../../../../escaped.gguf", vec![1]),
    ];
    let fake = Fake::new(files);
    assert!(fake.pull("o/n").unwrap_err().starts_with("o/n has neither"));
    let index = r#"{"weight_map": {"a": "../../../../escaped.safetensors"}}"#;
    let files: Files = vec![
        ("config.json", b"{}".to_vec()),
        ("model.safetensors.index.json", index.into()),
    ];
    let fake = Fake::new(files);
    assert!(fake.pull("o/n").unwrap_err().ends_with("names no files"));
    let home = tempfile::tempdir().unwrap();
    let server = Server::start(|_, _| {
        Answer::new(
            "200 OK",
            "application/json",
            r#"{"sha": "../../../../../../../../x/../../../../x", "siblings": []}"#,
        )
    });
    assert!(
        pulled(&hub_at(&server.address, home.path(), &[]), "o/n")
            .unwrap_err()
            .ends_with("it names no commit")
    );
}

#[test]
fn tokens_may_lie_in_a_file_and_caches_elsewhere() {
    let fake = Fake::new(whole_model());
    std::fs::write(fake.home.path().join("token"), "hf_file\n").unwrap();
    let cache = fake.home.path().join("other");
    let hub = hub_at(
        &fake.hub.address,
        fake.home.path(),
        &[("HF_HUB_CACHE", cache.to_str().unwrap())],
    );
    let done = pulled(&hub, "o/n").unwrap();
    assert!(done.path.starts_with(&cache));
    assert_eq!(
        fake.hub.seen()[0].header("authorization"),
        Some("Bearer hf_file")
    );

    // A file where a folder should be: unwritable even for an administrator.
    let hub = hub_at(
        &fake.hub.address,
        fake.home.path(),
        &[(
            "HF_HUB_CACHE",
            fake.home.path().join("token").to_str().unwrap(),
        )],
    );
    let message = pulled(&hub, "o/n").unwrap_err();
    assert!(
        message.starts_with("cannot write to ")
            && message.ends_with("set HF_HOME to another folder"),
        "{message}"
    );
}
