//! Finding a file on a package index: the simple repository API, as JSON (PEP 691) or HTML (PEP 503).

use super::http::{Failure, get, with_retries};
use super::pip::Settings;
use super::url::Url;
use std::io::Read;

const ACCEPT: &str = "application/vnd.pypi.simple.v1+json, application/vnd.pypi.simple.v1+html;q=0.2, text/html;q=0.1";

/// Longest page read: more than any project's list of files.
const MAX_PAGE: u64 = 64 << 20;

/// The address of `file` among `project`'s files on the first index that has it.
pub fn find(settings: &Settings, project: &str, file: &str) -> Result<Url, Failure> {
    let mut missing = None;
    for address in &settings.indexes {
        let index = Url::parse(address).ok_or_else(|| {
            let shown = super::url::masked(address);
            Failure::lasting(format!("the index address {shown} is not an http(s) URL"))
        })?;
        let page = index.child(project);
        match with_retries(|n| fetch_page(settings, &page, file, n)) {
            Ok(Some(url)) => return Ok(url),
            Ok(None) => {
                let message = format!("{page} does not list {file}");
                missing = missing.or(Some(Failure::lasting(message)));
            }
            Err(failure) if failure.status == Some(404) => missing = missing.or(Some(failure)),
            Err(failure) => return Err(failure),
        }
    }
    Err(missing.unwrap_or_else(|| {
        Failure::lasting(format!(
            "pip's settings allow no index (no-index), and no find-links folder has {file}"
        ))
    }))
}

fn fetch_page(
    settings: &Settings,
    page: &Url,
    file: &str,
    try_number: u32,
) -> Result<Option<Url>, Failure> {
    let response = get(settings, page, &[("Accept", ACCEPT.into())], try_number)?;
    let json = response
        .headers()
        .get("content-type")
        .and_then(|v| v.to_str().ok())
        .is_some_and(|v| v.contains("json"));
    let mut text = Vec::new();
    response
        .into_body()
        .into_reader()
        .take(MAX_PAGE)
        .read_to_end(&mut text)
        .map_err(|e| Failure::passing(format!("cannot fetch {page}: {e}")))?;
    let text = String::from_utf8_lossy(&text);
    let link = if json {
        json_link(&text, file)
            .map_err(|e| Failure::lasting(format!("{page} is not an index page: {e}")))?
    } else {
        html_link(&text, file)
    };
    Ok(link.and_then(|link| page.join(&link)))
}

fn json_link(text: &str, file: &str) -> Result<Option<String>, serde_json::Error> {
    let page: serde_json::Value = serde_json::from_str(text)?;
    let files = page["files"].as_array().into_iter().flatten();
    let mut named = files.filter(|entry| entry["filename"] == file);
    Ok(named.find_map(|entry| entry["url"].as_str().map(str::to_owned)))
}

/// The `href` of the anchor whose text is `file`.
fn html_link(text: &str, file: &str) -> Option<String> {
    text.split("<a").skip(1).find_map(|anchor| {
        let (tag, rest) = anchor.split_once('>')?;
        let label = rest.split("</a").next()?;
        if unescape(label.trim()) != file {
            return None;
        }
        let value = tag
            .split_once("href")?
            .1
            .trim_start()
            .strip_prefix('=')?
            .trim_start();
        let quote = value.chars().next().filter(|c| matches!(c, '"' | '\''))?;
        Some(unescape(value[1..].split(quote).next()?))
    })
}

fn unescape(text: &str) -> String {
    text.replace("&quot;", "\"")
        .replace("&#39;", "'")
        .replace("&lt;", "<")
        .replace("&gt;", ">")
        .replace("&amp;", "&")
}
