//! Where packages come from on this machine: the settings `pip` follows, read the way it reads them.
//!
//! Source: pip's documentation, "Configuration" and "pip download". Environment variables win over files; of files,
//! `PIP_CONFIG_FILE` wins over the virtual environment's, the user's and the machine's; a section named after the
//! command wins over `[global]`.

use super::url::Url;
use std::collections::HashMap;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Where packages come from where nothing says otherwise.
const DEFAULT_INDEX: &str = "https://pypi.org/simple";

/// What a download follows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// Index addresses, tried in order.
    pub indexes: Vec<String>,
    /// Local folders that may hold the package.
    pub folders: Vec<PathBuf>,
    /// File of trusted certificates in PEM form, and the setting that names it.
    pub certificates: Option<(String, PathBuf)>,
    /// Hosts whose certificate is not checked.
    pub trusted_hosts: Vec<String>,
    /// Longest wait for the next byte.
    pub timeout: Duration,
    /// pip's own proxy setting: used for every address.
    proxy: Option<String>,
    /// Proxies of the environment, by scheme, with `all` for any.
    scheme_proxies: HashMap<&'static str, String>,
    /// Hosts the environment's proxies are not used for.
    no_proxy: String,
}

impl Settings {
    /// Those of this process.
    pub fn of_process() -> Self {
        let variable = |name: &str| std::env::var(name).ok();
        Self::read(&variable, Path::new("/etc"))
    }

    /// From environment variables and the files they and `etc` lead to.
    pub fn read(variable: &dyn Fn(&str) -> Option<String>, etc: &Path) -> Self {
        let set = |name: &str| variable(name).filter(|value| !value.trim().is_empty());
        let mut options = HashMap::new();
        for path in config_files(&set, etc) {
            // Like pip, go on without a file that cannot be read.
            options.extend(parse_config(
                &std::fs::read_to_string(path).unwrap_or_default(),
            ));
        }
        let option = |name: &str| {
            set(&format!("PIP_{}", name.to_uppercase().replace('-', "_"))).or_else(|| {
                let in_section = |section: &str| options.get(&format!("{section}.{name}"));
                in_section("download")
                    .or_else(|| in_section("global"))
                    .filter(|value| !value.trim().is_empty())
                    .cloned()
            })
        };
        let words = |name: &str| -> Vec<String> {
            let value = option(name).unwrap_or_default();
            value.split_whitespace().map(str::to_owned).collect()
        };

        let no_index = matches!(
            option("no-index").map(|v| v.to_lowercase()).as_deref(),
            Some("1" | "true" | "yes" | "on")
        );
        let mut indexes = Vec::new();
        if !no_index {
            indexes.push(option("index-url").unwrap_or_else(|| DEFAULT_INDEX.into()));
            indexes.extend(words("extra-index-url"));
        }
        let certificates = option("cert")
            .map(|path| ("pip's cert setting".to_owned(), path))
            .or_else(|| {
                ["REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE"]
                    .into_iter()
                    .find_map(|name| Some((name.to_owned(), set(name)?)))
            });
        let either_case =
            |name: &str| set(name).or_else(|| set(&name.to_uppercase()).filter(|v| !v.is_empty()));
        Self {
            indexes,
            folders: words("find-links")
                .iter()
                .map(|link| link.strip_prefix("file://").unwrap_or(link))
                .filter(|link| !link.contains("://"))
                .map(PathBuf::from)
                .collect(),
            certificates: certificates.map(|(name, path)| (name, PathBuf::from(path))),
            trusted_hosts: words("trusted-host"),
            timeout: option("timeout")
                .or_else(|| option("default-timeout"))
                .and_then(|seconds| seconds.trim().parse::<f64>().ok())
                .and_then(|seconds| Duration::try_from_secs_f64(seconds).ok())
                .filter(|timeout| !timeout.is_zero())
                .unwrap_or(Duration::from_secs(15)),
            proxy: option("proxy"),
            scheme_proxies: [
                ("http", either_case("http_proxy")),
                ("https", either_case("https_proxy")),
                ("all", either_case("all_proxy")),
            ]
            .into_iter()
            .filter_map(|(scheme, proxy)| Some((scheme, proxy?)))
            .collect(),
            no_proxy: either_case("no_proxy").unwrap_or_default(),
        }
    }

    /// The proxy to reach `url` through.
    pub fn proxy_for(&self, url: &Url) -> Option<&str> {
        if let Some(proxy) = &self.proxy {
            return Some(proxy);
        }
        if self.bypassed(url) {
            return None;
        }
        self.scheme_proxies
            .get(url.scheme.as_str())
            .or_else(|| self.scheme_proxies.get("all"))
            .map(String::as_str)
    }

    /// Whether `NO_PROXY` lists the host: `*`, a name with all names below it, an address, a block of addresses.
    fn bypassed(&self, url: &Url) -> bool {
        let host = url.host().to_ascii_lowercase();
        self.no_proxy.split(',').map(str::trim).any(|entry| {
            let name = entry
                .trim_start_matches('*')
                .trim_start_matches('.')
                .to_ascii_lowercase();
            if name.is_empty() {
                return entry == "*";
            }
            let below = host
                .strip_suffix(&name)
                .is_some_and(|front| front.is_empty() || front.ends_with('.'));
            below || name == url.authority.to_ascii_lowercase() || in_block(&host, &name)
        })
    }

    /// Whether the certificate of `url`'s host goes unchecked.
    pub fn trusts(&self, url: &Url) -> bool {
        self.trusted_hosts
            .iter()
            .any(|host| host == url.host() || *host == url.authority)
    }
}

/// Whether an IPv4 address lies in a block such as `10.0.0.0/8`.
fn in_block(host: &str, block: &str) -> bool {
    let parse = || {
        let (network, bits) = block.split_once('/')?;
        let network = u32::from(network.parse::<Ipv4Addr>().ok()?);
        let host = u32::from(host.parse::<Ipv4Addr>().ok()?);
        let bits: u32 = bits.parse().ok().filter(|&bits| bits <= 32)?;
        let mask = u32::MAX.checked_shl(32 - bits).unwrap_or(0);
        Some(network & mask == host & mask)
    };
    parse().unwrap_or(false)
}

/// pip's configuration files from the weakest to the strongest.
fn config_files(set: &dyn Fn(&str) -> Option<String>, etc: &Path) -> Vec<PathBuf> {
    let named = set("PIP_CONFIG_FILE").map(PathBuf::from);
    if named.as_deref() == Some(Path::new("/dev/null")) {
        return Vec::new();
    }
    let mut files = Vec::new();
    for folder in set("XDG_CONFIG_DIRS").iter().flat_map(|v| v.split(':')) {
        files.push(Path::new(folder).join("pip/pip.conf"));
    }
    files.extend([etc.join("xdg/pip/pip.conf"), etc.join("pip.conf")]);
    let home = set("HOME").map(PathBuf::from);
    files.extend(home.iter().map(|home| home.join(".pip/pip.conf")));
    let config = set("XDG_CONFIG_HOME").map(PathBuf::from);
    let config = config.or_else(|| Some(home?.join(".config")));
    files.extend(config.map(|config| config.join("pip/pip.conf")));
    files.extend(set("VIRTUAL_ENV").map(|folder| Path::new(&folder).join("pip.conf")));
    files.extend(named);
    files
}

/// `section.key` to value. Keys are written with dashes or underscores; a value goes on over indented lines.
fn parse_config(text: &str) -> HashMap<String, String> {
    let mut options: HashMap<String, String> = HashMap::new();
    let (mut section, mut last) = (String::new(), None::<String>);
    for line in text.lines() {
        let trimmed = line.trim();
        if trimmed.is_empty() || trimmed.starts_with(['#', ';']) {
            continue;
        }
        if line.starts_with([' ', '\t'])
            && let Some(value) = last.as_ref().and_then(|key| options.get_mut(key))
        {
            value.push('\n');
            value.push_str(trimmed);
            continue;
        }
        if let Some(name) = trimmed.strip_prefix('[').and_then(|t| t.strip_suffix(']')) {
            section = name.to_owned();
            last = None;
        } else if let Some((key, value)) = trimmed.split_once(['=', ':']) {
            let key = key.trim().to_lowercase().replace('_', "-");
            let key = format!("{section}.{key}");
            options.insert(key.clone(), value.trim().to_owned());
            last = Some(key);
        }
    }
    options
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(variables: &[(&str, &str)], etc: &Path) -> Settings {
        let variable = |name: &str| {
            let found = variables.iter().find(|(known, _)| *known == name)?;
            Some(found.1.to_owned())
        };
        Settings::read(&variable, etc)
    }

    fn url(text: &str) -> Url {
        Url::parse(text).unwrap()
    }

    #[test]
    fn environment_wins_over_user_over_machine() {
        let dir = tempfile::tempdir().unwrap();
        let (etc, home) = (dir.path().join("etc"), dir.path().join("home"));
        std::fs::create_dir_all(home.join(".config/pip")).unwrap();
        std::fs::create_dir_all(&etc).unwrap();
        let home_text = home.to_str().unwrap();
        assert_eq!(read(&[("HOME", home_text)], &etc).indexes, [DEFAULT_INDEX]);

        let machine =
            "[global]\nindex_url = https://machine/simple\nproxy=http://p:1\ncert = /c.pem\n";
        std::fs::write(etc.join("pip.conf"), machine).unwrap();
        let settings = read(&[("HOME", home_text)], &etc);
        assert_eq!(settings.indexes, ["https://machine/simple"]);
        assert_eq!(settings.proxy_for(&url("https://x/")), Some("http://p:1"));
        assert_eq!(settings.certificates.unwrap().1, Path::new("/c.pem"));

        let user = "# note\n[global]\nindex-url: https://user/simple\nextra-index-url =\n  https://a\n  https://b\n";
        std::fs::write(home.join(".config/pip/pip.conf"), user).unwrap();
        let settings = read(&[("HOME", home_text)], &etc);
        assert_eq!(
            settings.indexes,
            ["https://user/simple", "https://a", "https://b"]
        );

        let both = [("HOME", home_text), ("PIP_INDEX_URL", "https://env/simple")];
        assert_eq!(read(&both, &etc).indexes[0], "https://env/simple");

        let named = dir.path().join("own.conf");
        std::fs::write(
            &named,
            "[global]\nindex-url=https://own\n[download]\nindex-url=https://cmd\n",
        )
        .unwrap();
        let own = [
            ("HOME", home_text),
            ("PIP_CONFIG_FILE", named.to_str().unwrap()),
        ];
        assert_eq!(read(&own, &etc).indexes[0], "https://cmd");
        let none = [("HOME", home_text), ("PIP_CONFIG_FILE", "/dev/null")];
        assert_eq!(read(&none, &etc).indexes, [DEFAULT_INDEX]);
    }

    #[test]
    fn proxies_follow_scheme_and_no_proxy() {
        let nowhere = Path::new("/nonexistent");
        let variables = [
            ("HTTPS_PROXY", "http://secure:1"),
            ("http_proxy", "http://plain:2"),
            (
                "NO_PROXY",
                "localhost, .inner.example,10.0.0.0/8,other:8080",
            ),
        ];
        let settings = read(&variables, nowhere);
        let proxy = |text: &str| settings.proxy_for(&url(text)).map(str::to_owned);
        assert_eq!(
            proxy("https://a.example/x").as_deref(),
            Some("http://secure:1")
        );
        assert_eq!(
            proxy("http://a.example/x").as_deref(),
            Some("http://plain:2")
        );
        for direct in [
            "http://localhost:99/",
            "https://a.inner.example/",
            "https://inner.example/",
            "http://10.2.3.4/",
            "http://other:8080/",
        ] {
            assert_eq!(proxy(direct), None, "{direct}");
        }
        assert!(proxy("http://notinner.example/").is_some());
        assert!(proxy("http://11.2.3.4/").is_some());
        assert!(proxy("http://other:81/").is_some());

        let all = read(&[("all_proxy", "socks5://s:3"), ("NO_PROXY", "*")], nowhere);
        assert_eq!(all.proxy_for(&url("http://a/")), None);
        let pip = read(&[("PIP_PROXY", "http://pip:4"), ("NO_PROXY", "*")], nowhere);
        assert_eq!(pip.proxy_for(&url("http://a/")), Some("http://pip:4"));
    }

    #[test]
    fn folders_hosts_and_timeouts() {
        let nowhere = Path::new("/nonexistent");
        let variables = [
            (
                "PIP_FIND_LINKS",
                "/wheels file:///more https://not.a/folder",
            ),
            ("PIP_NO_INDEX", "1"),
            ("PIP_TRUSTED_HOST", "inner.example other:8080"),
            ("PIP_DEFAULT_TIMEOUT", "42"),
        ];
        let settings = read(&variables, nowhere);
        assert_eq!(settings.folders, [Path::new("/wheels"), Path::new("/more")]);
        assert!(settings.indexes.is_empty());
        assert!(settings.trusts(&url("https://inner.example:1/")));
        assert!(settings.trusts(&url("https://other:8080/")));
        assert!(!settings.trusts(&url("https://other/")));
        assert_eq!(settings.timeout, Duration::from_secs(42));
    }
}
