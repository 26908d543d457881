//! Certificates of locked geometries: made at first use, kept in the cache folder by environment, model and geometry.

use crate::output::note;
use crate::session::Session;
use anyhow::{Context, Result, bail};
use engine::Protection;
use engine::certify::{Certificate, CertifyError};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

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

/// The certificate of the geometry a prompt of so many tokens has under `protection`: kept or made now. `None` where the
/// protection has none, or (said so) where the KV pool is too small to find out. An error where it can't be kept.
pub fn of(session: &Session, protection: Protection, prompt: usize) -> Result<Option<Certificate>> {
    let Some((environment_id, geometry)) = session.locked_facts(protection, prompt) else {
        return Ok(None);
    };
    let numerics_id = session.numerics_id();
    let name = [&environment_id, &numerics_id, protection.name(), &geometry].join("\n");
    let name = format!("{}.json", &blake3::hash(name.as_bytes()).to_hex()[..32]);
    let path = folder()?.join(name);
    let holds = |k: &Kept| {
        k.environment_id == environment_id
            && k.numerics_id == numerics_id
            && (k.certificate.protection.as_str(), &k.certificate.geometry)
                == (protection.name(), &geometry)
    };
    let certificate = match read(&path).filter(holds) {
        Some(kept) => kept.certificate,
        None => {
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
            let kept = Kept {
                environment_id,
                numerics_id,
                certificate,
            };
            if let Err(e) = write(&path, &kept) {
                note(&format!("the certificate is not kept: {e:#}"));
            }
            kept.certificate
        }
    };
    if let Some(by) = &certificate.broken_by {
        bail!(
            "protection {protection} can't be kept on this device: in {geometry}, {by} changed the target's bits"
        );
    }
    Ok(Some(certificate))
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
