//! The little of URLs a package index needs: parts, joining a link to its page, credentials kept out of sight.

/// An absolute `http` or `https` URL.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Url {
    /// `http` or `https`.
    pub scheme: String,
    /// `user:password`, still percent-encoded.
    credentials: Option<String>,
    /// Host and, where given, port.
    pub authority: String,
    /// From the first slash on, with the query, without the fragment.
    path: String,
}

impl Url {
    /// Splits a URL; `None` where it is not an absolute one of `http` or `https`.
    pub fn parse(text: &str) -> Option<Self> {
        let (scheme, rest) = text.trim().split_once("://")?;
        let scheme = scheme.to_ascii_lowercase();
        let rest = rest.split('#').next().unwrap_or_default();
        let (authority, path) = match rest.find(['/', '?']) {
            Some(at) => rest.split_at(at),
            None => (rest, "/"),
        };
        let (credentials, authority) = match authority.rsplit_once('@') {
            Some((credentials, host)) => (Some(credentials.to_owned()), host),
            None => (None, authority),
        };
        let ok = matches!(scheme.as_str(), "http" | "https")
            && !authority.is_empty()
            && !text
                .trim()
                .contains(|c: char| c.is_whitespace() || c.is_control());
        let slash = if path.starts_with('/') { "" } else { "/" };
        ok.then(|| Self {
            scheme,
            credentials,
            authority: authority.to_owned(),
            path: format!("{slash}{path}"),
        })
    }

    /// The host without its port.
    pub fn host(&self) -> &str {
        let port = self
            .authority
            .rfind(':')
            .filter(|&at| !self.authority[at..].contains(']'));
        let host = port.map_or(self.authority.as_str(), |at| &self.authority[..at]);
        host.trim_matches(['[', ']'])
    }

    /// What is asked of the server: everything but the credentials, which travel in a header.
    pub fn request(&self) -> String {
        format!("{}://{}{}", self.scheme, self.authority, self.path)
    }

    /// Value of the `Authorization` header its credentials make.
    pub fn authorization(&self) -> Option<String> {
        let credentials = self.credentials.as_ref()?;
        let (user, password) = credentials.split_once(':').unwrap_or((credentials, ""));
        let mut plain = percent_decode(user);
        plain.push(b':');
        plain.extend(percent_decode(password));
        Some(format!("Basic {}", base64(&plain)))
    }

    /// A page below this one: an index's page of a project.
    pub fn child(&self, name: &str) -> Self {
        self.below(&format!("{name}/"))
    }

    /// What lies below this one at a path, which is percent-encoded already.
    pub fn below(&self, path: &str) -> Self {
        let path = format!("{}/{path}", self.path.trim_end_matches('/'));
        Self {
            path,
            ..self.clone()
        }
    }

    /// What a link on this page leads to. A link to the same host inherits the credentials.
    pub fn join(&self, link: &str) -> Option<Self> {
        let link = link.split('#').next().unwrap_or_default().trim();
        let mut target = if link.contains("://") {
            Self::parse(link)?
        } else if link.starts_with("//") {
            Self::parse(&format!("{}:{link}", self.scheme))?
        } else {
            let page = self.path.split('?').next().unwrap_or_default();
            let folder = page.rsplit_once('/').map_or("", |(folder, _)| folder);
            let mut parts: Vec<&str> = match link.starts_with('/') {
                true => Vec::new(),
                false => folder.split('/').skip(1).collect(),
            };
            for part in link.strip_prefix('/').unwrap_or(link).split('/') {
                match part {
                    "." => {}
                    ".." => drop(parts.pop()),
                    part => parts.push(part),
                }
            }
            Self {
                path: format!("/{}", parts.join("/")),
                ..self.clone()
            }
        };
        if target.credentials.is_none() && target.authority == self.authority {
            target.credentials.clone_from(&self.credentials);
        }
        Some(target)
    }
}

/// For messages: credentials show as stars.
impl std::fmt::Display for Url {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let stars = if self.credentials.is_some() {
            "****@"
        } else {
            ""
        };
        write!(
            f,
            "{}://{stars}{}{}",
            self.scheme, self.authority, self.path
        )
    }
}

/// Any text that may hold a URL, fit for a message.
pub fn masked(text: &str) -> String {
    let (scheme, rest) = match text.split_once("://") {
        Some((scheme, rest)) => (format!("{scheme}://"), rest),
        None => (String::new(), text),
    };
    match rest.rsplit_once('@') {
        Some((_, host)) => format!("{scheme}****@{host}"),
        None => text.to_owned(),
    }
}

fn percent_decode(text: &str) -> Vec<u8> {
    let mut out = Vec::with_capacity(text.len());
    let mut bytes = text.as_bytes().iter();
    while let Some(&b) = bytes.next() {
        let ahead = bytes.as_slice().get(..2).filter(|_| b == b'%');
        let code = ahead
            .and_then(|hex| std::str::from_utf8(hex).ok())
            .and_then(|hex| u8::from_str_radix(hex, 16).ok());
        match code {
            Some(code) => {
                out.push(code);
                bytes.nth(1);
            }
            None => out.push(b),
        }
    }
    out
}

fn base64(data: &[u8]) -> String {
    const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut out = String::new();
    for chunk in data.chunks(3) {
        let word =
            chunk.iter().fold(0u32, |w, &b| w << 8 | u32::from(b)) << (8 * (3 - chunk.len()));
        for i in 0..4 {
            let symbol = ALPHABET[(word >> (18 - 6 * i) & 63) as usize];
            out.push(if i <= chunk.len() {
                symbol as char
            } else {
                '='
            });
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn joins_links_as_browsers_do() {
        let page = Url::parse("http://u:p@host:81/root/simple/name/").unwrap();
        let joined = |link: &str| page.join(link).unwrap();
        assert_eq!(
            joined("../../packages/a.whl#sha256=0").request(),
            "http://host:81/root/packages/a.whl"
        );
        assert_eq!(joined("/b/a.whl").request(), "http://host:81/b/a.whl");
        assert_eq!(
            joined("a.whl").request(),
            "http://host:81/root/simple/name/a.whl"
        );
        assert_eq!(joined("//other/a.whl").request(), "http://other/a.whl");
        assert_eq!(joined("a.whl").authorization().unwrap(), "Basic dTpw");
        assert_eq!(joined("https://other/a.whl").authorization(), None);
    }

    #[test]
    fn credentials_are_decoded_once_and_never_shown() {
        let url = Url::parse("https://al%40ice:s%3Acret@host/simple").unwrap();
        assert_eq!(
            url.authorization().unwrap(),
            format!("Basic {}", base64(b"al@ice:s:cret"))
        );
        assert_eq!(url.to_string(), "https://****@host/simple");
        assert_eq!(url.host(), "host");
        assert_eq!(masked("socks5://a:b@c:1"), "socks5://****@c:1");
        assert_eq!(masked("a:b@c:1"), "****@c:1");
        assert_eq!(Url::parse("https://[::1]:8080/x").unwrap().host(), "::1");
    }

    #[test]
    fn base64_pads() {
        for (plain, coded) in [("", ""), ("f", "Zg=="), ("fo", "Zm8="), ("foo", "Zm9v")] {
            assert_eq!(base64(plain.as_bytes()), coded);
        }
    }
}
