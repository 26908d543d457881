//! HTTP for downloads: one request with pip's proxies and certificates, failures told in one line, and which of them
//! are worth another try.

use super::pip::Settings;
use super::url::{Url, masked};
use std::io::ErrorKind;
use std::time::Duration;
use ureq::http::Response;
use ureq::tls::{Certificate, PemItem, RootCerts, TlsConfig, parse_pem};
use ureq::{Agent, Body, Proxy};

/// Where systems keep the certificates they trust.
const SYSTEM_CERTIFICATES: [&str; 4] = [
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
];

/// Time to connect at the first try; later ones wait longer.
const CONNECT: Duration = Duration::from_secs(3);

/// Tries of one request.
pub const TRIES: u32 = 3;

/// Why something failed, in one line, and whether trying again may help.
#[derive(Debug, PartialEq, Eq)]
pub struct Failure {
    /// For the user.
    pub message: String,
    /// Another try may succeed.
    pub again: bool,
    /// The server's answer, where it gave one that is a failure.
    pub status: Option<u16>,
}

impl Failure {
    /// One that another try would only repeat.
    pub fn lasting(message: impl Into<String>) -> Self {
        Self {
            message: message.into(),
            again: false,
            status: None,
        }
    }

    /// One that may pass.
    pub fn passing(message: impl Into<String>) -> Self {
        Self {
            again: true,
            ..Self::lasting(message)
        }
    }
}

/// Runs `attempt` (told its number, from 0) until it succeeds, fails for good, or has failed [`TRIES`] times.
pub fn with_retries<T>(mut attempt: impl FnMut(u32) -> Result<T, Failure>) -> Result<T, Failure> {
    let mut number = 0;
    loop {
        match attempt(number) {
            Err(failure) if failure.again && number + 1 < TRIES => {
                number += 1;
                std::thread::sleep(Duration::from_millis(250) * number);
            }
            Err(mut failure) if failure.again => {
                failure.message.push_str(&format!(" ({TRIES} tries)"));
                return Err(failure);
            }
            result => return result,
        }
    }
}

/// GETs `url` and what it redirects to; answers other than 2xx are failures. `try_number` counts from 0.
pub fn get(
    settings: &Settings,
    url: &Url,
    headers: &[(&str, String)],
    try_number: u32,
) -> Result<Response<Body>, Failure> {
    get_through(settings, url, headers, try_number, 10)
}

/// The same, following this many redirects. Where none are followed, one is an answer.
pub fn get_through(
    settings: &Settings,
    url: &Url,
    headers: &[(&str, String)],
    try_number: u32,
    redirects: u32,
) -> Result<Response<Body>, Failure> {
    let proxy = settings.proxy_for(url);
    let through = proxy.map_or(String::new(), |proxy| {
        format!(" through the proxy {}", masked(proxy))
    });
    let failed = |reason: String| format!("cannot fetch {url}{through}: {reason}");
    let proxy = match proxy.map(Proxy::new).transpose() {
        Ok(proxy) => proxy,
        Err(_) => {
            return Err(Failure::lasting(failed(
                "this is not a proxy address".into(),
            )));
        }
    };
    let tls = tls(settings, url).map_err(Failure::lasting)?;
    let agent: Agent = Agent::config_builder()
        .proxy(proxy)
        .tls_config(tls)
        .max_redirects(redirects)
        .max_redirects_will_error(redirects > 0)
        .timeout_connect(Some(CONNECT * (try_number + 1)))
        .timeout_recv_response(Some(settings.timeout))
        .timeout_per_read(Some(settings.timeout))
        .user_agent(concat!("blocklock/", env!("CARGO_PKG_VERSION")))
        .build()
        .into();
    let mut request = agent.get(url.request());
    for (name, value) in headers {
        request = request.header(*name, value);
    }
    if let Some(value) = url.authorization() {
        request = request.header("Authorization", value);
    }
    request.call().map_err(|error| {
        let mut failure = describe(&error);
        failure.message = failed(failure.message);
        failure
    })
}

/// What an error of the HTTP library means to the user.
pub fn describe(error: &ureq::Error) -> Failure {
    match error {
        ureq::Error::StatusCode(code) => Failure {
            message: match code {
                404 => "the server answers 404, not found".into(),
                401 | 403 => {
                    format!("the server answers {code}, not allowed with these credentials")
                }
                _ => format!("the server answers {code}"),
            },
            again: *code >= 500 || *code == 429,
            status: Some(*code),
        },
        ureq::Error::Timeout(what) => Failure::passing(format!("no answer in time ({what})")),
        ureq::Error::HostNotFound => Failure::lasting("the host's name is not known"),
        ureq::Error::ConnectProxyFailed(reason) => {
            Failure::lasting(format!("the proxy refuses: {reason}"))
        }
        ureq::Error::Io(e) => match e.kind() {
            ErrorKind::ConnectionRefused => Failure::lasting("the connection is refused"),
            ErrorKind::UnexpectedEof => Failure::passing("the connection closed too early"),
            _ => Failure::passing(e.to_string()),
        },
        other => Failure::lasting(other.to_string()),
    }
}

fn tls(settings: &Settings, url: &Url) -> Result<TlsConfig, String> {
    let roots = match &settings.certificates {
        Some((setting, path)) => {
            let pem = std::fs::read(path);
            let pem =
                pem.map_err(|e| format!("cannot read {} ({setting}): {e}", path.display()))?;
            let certificates = certificates(&pem);
            if certificates.is_empty() {
                return Err(format!("no certificate in {} ({setting})", path.display()));
            }
            RootCerts::new_with_certs(&certificates)
        }
        None => SYSTEM_CERTIFICATES
            .iter()
            .filter_map(|path| std::fs::read(path).ok())
            .map(|pem| certificates(&pem))
            .find(|certificates| !certificates.is_empty())
            .map_or(RootCerts::WebPki, |list| RootCerts::new_with_certs(&list)),
    };
    Ok(TlsConfig::builder()
        .root_certs(roots)
        .disable_verification(settings.trusts(url))
        .build())
}

fn certificates(pem: &[u8]) -> Vec<Certificate<'static>> {
    parse_pem(pem)
        .filter_map(|item| match item {
            Ok(PemItem::Certificate(certificate)) => Some(certificate),
            _ => None,
        })
        .collect()
}
