//! The page at `/`: one prompt solo and in a crowd, side by side. It is one file, asks nobody but this server, and may do
//! nothing else: its policy names its own style and script by their hashes.

use axum::http::{HeaderName, header};
use axum::response::{Html, IntoResponse};
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use sha2::{Digest, Sha256};
use std::sync::LazyLock;

const PAGE: &str = include_str!("page.html");

static POLICY: LazyLock<String> = LazyLock::new(|| {
    format!(
        "default-src 'none'; style-src {}; script-src {}; connect-src 'self'; img-src data:; base-uri 'none'; \
         form-action 'none'; frame-ancestors 'none'",
        hash("style"),
        hash("script")
    )
});

/// The source of an element of the page, as a policy names it.
fn hash(element: &str) -> String {
    let begin = PAGE.split_once(&format!("<{element}>"));
    let inside = begin.and_then(|(_, rest)| rest.split_once(&format!("</{element}>")));
    let text = inside.map_or("", |(text, _)| text);
    format!("'sha256-{}'", BASE64_STANDARD.encode(Sha256::digest(text)))
}

/// Answers with the page.
pub async fn page() -> impl IntoResponse {
    let fixed = [
        (header::CONTENT_SECURITY_POLICY, POLICY.as_str()),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
        (header::CACHE_CONTROL, "no-cache"),
        (
            HeaderName::from_static("cross-origin-opener-policy"),
            "same-origin",
        ),
    ];
    (fixed, Html(PAGE))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_brings_all_it_needs_and_its_policy_allows_that_alone() {
        for element in ["style", "script"] {
            assert_eq!(PAGE.matches(&format!("<{element}")).count(), 1, "{element}");
            assert_ne!(hash(element), hash("nothing"), "{element} is empty");
        }
        for outside in [
            "http:",
            "https:",
            "src=",
            "url(",
            "@import",
            "style=\"",
            "onclick",
            "innerHTML",
        ] {
            assert!(!PAGE.contains(outside), "{outside}");
        }
        assert!(!POLICY.contains("unsafe"), "{}", *POLICY);
    }
}
