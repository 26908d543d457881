//! The page at `/`, in a real browser.

use crate::clients::{finish, python, script};
use crate::serving::*;
use crate::support::*;
use std::path::PathBuf;
use std::process::Command;

/// The browser: BLOCKLOCK_CHROMIUM, or the system's.
fn chromium(test: &str) -> Option<PathBuf> {
    let given = std::env::var_os("BLOCKLOCK_CHROMIUM").map(PathBuf::from);
    let system = [
        "/usr/bin/chromium",
        "/usr/bin/chromium-browser",
        "/usr/bin/google-chrome",
    ];
    let mut all = given.into_iter().chain(system.map(PathBuf::from));
    let found = all.find(|path| path.is_file());
    if found.is_none() {
        println!("not run: {test}: no Chromium (scripts/clients.sh installs it)");
    }
    found
}

/// Drives the page; what the script printed.
fn drive(test: &str, server: &Serving, more: &[&str]) -> Option<String> {
    let (python, chromium) = (python(test)?, chromium(test)?);
    let mut command = Command::new(python);
    command
        .arg(script("page.py"))
        .arg(format!("http://{}", server.address));
    command.arg(chromium).args(more);
    // Screenshots, for who wants to look at them.
    if let Some(folder) = std::env::var_os("BLOCKLOCK_SHOTS") {
        command.arg("--shots").arg(PathBuf::from(folder).join(test));
    }
    Some(finish(&mut command))
}

#[test]
fn the_page_is_one_file_under_a_strict_policy() {
    let server = Serving::start(&["--model", TINY, "--protections", "none,invariant"]);
    let page = server.get("/");
    assert_eq!(page.status, 200);
    let head = page.head.to_lowercase();
    let policy = head
        .lines()
        .find_map(|l| l.strip_prefix("content-security-policy: "));
    let policy = policy.expect("a policy");
    assert!(
        policy.starts_with("default-src 'none'; style-src 'sha256-"),
        "{policy}"
    );
    assert!(
        policy.contains("; connect-src 'self'; ") && !policy.contains("unsafe"),
        "{policy}"
    );
    assert!(
        head.contains("content-type: text/html; charset=utf-8"),
        "{head}"
    );
    assert!(page.body.starts_with("<!doctype html>"), "{}", page.body);
}

#[test]
fn the_page_shows_what_diverges_and_what_holds() {
    let folder = folder();
    let rungs = "rows = 2\nrow_widths = [16]\ndecode_rows = 4\npack_totals = [32]\n";
    let config = file(&folder, "c.toml", rungs);
    let args = ["--model", TINY, "--device", "hostile", "--config", &config];
    let server = Serving::start(&args);
    let locked = ["isolated:held", "rows:held", "pack:held"];
    let cases = [
        &["none:diverged"],
        &locked[..],
        &["invariant:held", "--all"],
    ]
    .concat();
    let Some(said) = drive("page", &server, &cases) else {
        return;
    };
    for line in [
        "none: DIVERGED at step ",
        "pack: HELD: 24 steps, same bits",
        "keyboard: ",
        "token: ",
        "errors: ",
        "narrow: ",
    ] {
        assert!(said.contains(line), "{said}");
    }
}

#[test]
fn the_page_asks_for_a_key_where_one_is_needed() {
    let folder = folder();
    let keys = file(&folder, "keys", "open sesame\n");
    let server = Serving::start(&[
        "--model",
        TINY,
        "--protections",
        "invariant",
        "--api-keys",
        &keys,
    ]);
    drive(
        "page_key",
        &server,
        &["--key", "open sesame", "invariant:held"],
    );
}

#[test]
fn the_page_with_the_default_model() {
    let model = match default_model() {
        Ok(path) => text(&path),
        Err(why) => return println!("not run: the_page_with_the_default_model: {why}"),
    };
    let server = Serving::start(&["--model", &model, "--protections", "none,invariant"]);
    drive("page_text", &server, &["invariant:held"]);
}
