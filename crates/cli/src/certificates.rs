//! Certificates of locked geometries: made at first use, kept in the cache folder by environment, model and geometry.

use crate::args::Global;
use crate::output::note;
use crate::progress;
use crate::session::Session;
use anyhow::{Context, Result, bail};
use engine::certify::{Certificate, CertifyError};
use engine::protections::{Planner, Work};
use engine::{EngineConfig, Protection};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// A certificate and what it holds for.
#[derive(Serialize, Deserialize)]
struct Kept {
    environment_id: String,
    numerics_id: String,
    certificate: Certificate,
}

fn folder() -> Result<PathBuf> {
    Ok(crate::download::cache_folder()?.join("certificates"))
}

/// Certificates looked up or made so far.
pub struct Certificates<'a> {
    session: &'a Session,
    known: HashMap<(Protection, String), Option<Certificate>>,
}

impl<'a> Certificates<'a> {
    /// None yet.
    pub fn new(session: &'a Session) -> Self {
        Self {
            session,
            known: HashMap::new(),
        }
    }

    /// Whether [`Certificates::of`] would run the device: no engine on it may have requests then, nor a prefix cache.
    pub fn must_be_made(&self, protection: Protection, prompt: usize) -> bool {
        let Some(geometry) = self.session.certified_as(protection, prompt) else {
            return false;
        };
        let known = self.known.contains_key(&(protection, geometry.clone()));
        !known && kept(self.session, protection, &geometry).is_none()
    }

    /// Settings under which targets with prompts of these lengths share launches where their geometries' certificates allow.
    pub fn sharing(
        &mut self,
        mut config: EngineConfig,
        protections: &[Protection],
        prompts: impl Iterator<Item = usize> + Clone,
    ) -> Result<EngineConfig> {
        for &protection in protections {
            for prompt in prompts.clone() {
                let certificate = self.of(protection, prompt)?;
                let shared = certificate.filter(|c| c.equivariant);
                let shared = shared.map(|c| (protection, c.geometry));
                let known = &mut config.locked.equivariant;
                known.extend(shared.filter(|s| !known.contains(s)));
            }
        }
        Ok(config)
    }

    /// The certificate of the geometry a prompt of so many tokens has under `protection`: kept, or made now. `None`
    /// where the protection has none, or (said so) where the KV pool is too small to find out. An error where the
    /// protection can't be kept.
    pub fn of(&mut self, protection: Protection, prompt: usize) -> Result<Option<Certificate>> {
        let certificate = self.find(protection, prompt)?;
        if let Some((c, by)) = certificate
            .as_ref()
            .and_then(|c| Some((c, c.broken_by.as_ref()?)))
        {
            bail!(
                "protection {protection} can't be kept on this device: in {}, {by} changed the target's bits",
                c.geometry
            );
        }
        Ok(certificate)
    }

    /// The same, whatever the certificate says.
    pub fn find(&mut self, protection: Protection, prompt: usize) -> Result<Option<Certificate>> {
        let Some(geometry) = self.session.certified_as(protection, prompt) else {
            return Ok(None);
        };
        let key = (protection, geometry.clone());
        let certificate = match self.known.get(&key) {
            Some(known) => known.clone(),
            None => match kept(self.session, protection, &geometry) {
                Some(certificate) => Some(certificate),
                None => make(self.session, protection, prompt)?,
            },
        };
        self.known.insert(key, certificate.clone());
        Ok(certificate)
    }
}

/// Makes or finds the certificates of the rungs of those of `protections` that are locked, small rungs first. Those that
/// would have to be made are left out where that would end after `limit`; how many, comes second.
pub fn all_rungs(
    global: &Global,
    session: &Session,
    protections: &[Protection],
    limit: Option<Duration>,
) -> Result<(Vec<Certificate>, usize)> {
    let planners = engine::protections::all(&session.facts(), session.host().locked());
    // By the rows of their first launch, which is what they cost.
    let rows = |planner: &dyn Planner, prompt: usize| -> usize {
        let work = Work {
            rows: prompt,
            length: prompt,
            prompt,
        };
        planner.plan(&[work]).iter().map(|g| g.rows).sum()
    };
    let mut rungs: Vec<(Protection, usize, usize)> = planners
        .iter()
        .filter(|(p, _)| protections.contains(p))
        .flat_map(|(p, planner)| {
            let rungs = planner.rungs().into_iter();
            rungs.map(|prompt| (*p, prompt, rows(&**planner, prompt)))
        })
        .collect();
    rungs.sort_by_key(|&(_, _, rows)| rows);
    let mut certificates = Certificates::new(session);
    let bar = progress::bar(global, rungs.len() as u64);
    let (mut found, mut left) = (Vec::new(), 0);
    let start = Instant::now();
    // Of each protection the last one made: its rows, and the time it took.
    let mut made: HashMap<Protection, (usize, Duration)> = HashMap::new();
    for (protection, prompt, rows) in rungs {
        bar.set_message(protection.name());
        bar.inc(1);
        if !certificates.must_be_made(protection, prompt) {
            found.extend(certificates.find(protection, prompt)?);
            continue;
        }
        let longer = |&(less, took): &(usize, Duration)| took.mul_f64(rows as f64 / less as f64);
        let expected = made.get(&protection).map_or(Duration::ZERO, longer);
        let begun = Instant::now();
        if limit.is_some_and(|limit| begun + expected >= start + limit) {
            left += 1;
            continue;
        }
        found.extend(certificates.find(protection, prompt)?);
        made.insert(protection, (rows.max(1), begun.elapsed()));
    }
    bar.finish_and_clear();
    Ok((found, left))
}

fn make(session: &Session, protection: Protection, prompt: usize) -> Result<Option<Certificate>> {
    let start = std::time::Instant::now();
    let certificate = match session.host().certify(protection, prompt) {
        Ok(certificate) => certificate,
        // The request itself is refused for the same reason, in the engine's words.
        Err(CertifyError::Refused(_)) => return Ok(None),
        Err(e @ CertifyError::KvTooSmall { .. }) => {
            note(&format!("not certified: {e}"));
            return Ok(None);
        }
        Err(e) => return Err(e).context("certification failed"),
    };
    tracing::info!(
        "{protection}: {} {}, in {:.1} s",
        certificate.geometry,
        verdict(&certificate),
        start.elapsed().as_secs_f64()
    );
    let path = path(session, protection, &certificate.geometry)?;
    let kept = Kept {
        environment_id: session.environment_id(),
        numerics_id: session.numerics_id(),
        certificate,
    };
    if let Err(e) = write(&path, &kept) {
        note(&format!("the certificate is not kept: {e:#}"));
    }
    Ok(Some(kept.certificate))
}

/// What a certificate says, in words.
pub fn verdict(certificate: &Certificate) -> String {
    match (&certificate.broken_by, certificate.equivariant) {
        (Some(by), _) => format!("NOT KEPT HERE: changed by {by}"),
        (None, true) => "certified; a target's row does not matter".into(),
        (None, false) => "certified".into(),
    }
}

fn path(session: &Session, protection: Protection, geometry: &str) -> Result<PathBuf> {
    let (environment, numerics) = (session.environment_id(), session.numerics_id());
    let name = [&environment, &numerics, protection.name(), geometry].join("\n");
    let name = format!("{}.json", &blake3::hash(name.as_bytes()).to_hex()[..32]);
    Ok(folder()?.join(name))
}

/// The certificate kept for this environment and model, if there is one.
fn kept(session: &Session, protection: Protection, geometry: &str) -> Option<Certificate> {
    let kept = read(&path(session, protection, geometry).ok()?)?;
    let c = &kept.certificate;
    let holds = kept.environment_id == session.environment_id()
        && kept.numerics_id == session.numerics_id()
        && (c.protection.as_str(), c.geometry.as_str()) == (protection.name(), geometry);
    holds.then_some(kept.certificate)
}

/// All certificates kept for this environment and model.
pub fn all(session: &Session) -> Vec<Certificate> {
    let (environment, numerics) = (session.environment_id(), session.numerics_id());
    let entries = folder().and_then(|f| Ok(std::fs::read_dir(f)?));
    let mut found: Vec<Certificate> = entries
        .into_iter()
        .flatten()
        .filter_map(|entry| read(&entry.ok()?.path()))
        .filter(|k| k.environment_id == environment && k.numerics_id == numerics)
        .map(|k| k.certificate)
        .collect();
    found.sort_by(|a, b| (&a.protection, &a.geometry).cmp(&(&b.protection, &b.geometry)));
    found
}

fn read(path: &Path) -> Option<Kept> {
    serde_json::from_slice(&std::fs::read(path).ok()?).ok()
}

/// Writes aside, then renames: a reader sees a whole file or none.
fn write(path: &Path, kept: &Kept) -> Result<()> {
    let folder = path.parent().context("no folder")?;
    std::fs::create_dir_all(folder)?;
    let mut file = tempfile::NamedTempFile::new_in(folder)?;
    serde_json::to_writer(&mut file, kept)?;
    file.persist(path)?;
    Ok(())
}
