//! `serve`: loads the model, certifies what it has to, and hands an engine on its own thread to the server.

use crate::args::{Global, ServeArgs};
use crate::certificates::{self, Certificates};
use crate::output;
use crate::session::{KvNeed, Opened, Session};
use crate::settings::Settings;
use crate::{Outcome, identity};
use anyhow::{Context, Result, bail};
use engine::certify::Certificate;
use engine::{EngineConfig, EngineHandle, EngineThread, Protection};
use numerics::sample::SamplingParams;
use serde_json::json;
use server::{Certified, Grammars, Options, Promise, Served, Server};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

/// Runs the command.
pub fn run(global: &Global, args: &ServeArgs) -> Result<Outcome> {
    let settings = Settings::resolve(global)?;
    let default = Protection::from(args.protection.unwrap_or(settings.protection.value));
    let protections: Vec<Protection> = match args.protections.is_empty() {
        true => Protection::ALL.to_vec(),
        false => args.protections.iter().map(|&p| p.into()).collect(),
    };
    if !protections.contains(&default) {
        bail!("--protection {default} is not among --protections");
    }
    let opened = Opened::open(&settings)?;
    let server = Server::bind(args.listen, options(args)?)
        .with_context(|| format!("--listen {}: cannot listen there", args.listen))?;
    // Where nobody can read this, it serves all the same.
    let _ = output::print(&format!("listening on http://{}\n", server.address()));
    // Beside all else that a start takes, so that no request waits for it.
    let grammars = opened
        .tokenizer()
        .map(|t| Grammars::beginning(Arc::clone(t)));
    let session = opened.start(&protections, KvNeed::Settings)?;
    say_what_takes_long(&session, &protections, args.certify_time);
    let limit = Duration::from_secs(args.certify_time.into());
    let (certificates, left) =
        certificates::all_rungs(global, &session, &protections, Some(limit))?;
    if left > 0 {
        tracing::warn!(
            "{left} geometries of locked protections are not certified yet, and requests of theirs are refused; \
             `blocklock inspect --certify` with the same settings certifies all, or a start with a longer --certify-time"
        );
    }
    let config = EngineConfig {
        max_waiting: args.max_queue as usize,
        ..settings.engine()
    };
    let mut engine = session.engine(config)?;
    certificates.iter().for_each(|c| engine.adopt(c));
    let engine = EngineThread::spawn(engine).context("cannot start the engine's thread")?;
    let mut served = served(&session, engine, default, protections, certificates);
    if let Some(name) = &args.served_name {
        served.name.clone_from(name);
    }
    let (tokenizer, template) = session.into_text();
    server.ready(Served {
        tokenizer,
        template,
        grammars: grammars.unwrap_or_default(),
        ..served
    });
    let _ = output::print("ready\n");
    tracing::info!(address = %server.address(), "ready");
    server.wait().context("the server failed")?;
    Ok(Outcome::Done)
}

/// Says how many certificates have to be made before it is ready.
fn say_what_takes_long(session: &Session, protections: &[Protection], seconds: u32) {
    let known = Certificates::new(session);
    let planners = engine::protections::all(&session.facts(), session.host().locked());
    let served = planners.iter().filter(|(p, _)| protections.contains(p));
    let rungs = served.flat_map(|(p, planner)| planner.rungs().into_iter().map(|r| (*p, r)));
    let missing = rungs.filter(|&(p, r)| known.must_be_made(p, r)).count();
    if missing > 0 {
        tracing::info!(
            "{missing} geometries of locked protections are certified first, as far as {seconds} s reach, and kept for later starts; \
             shorter ladders in the configuration are quicker, and --protections none,invariant needs none"
        );
    }
}

/// What is served, but for tokenizer and template.
pub fn served(
    session: &Session,
    engine: EngineHandle,
    default: Protection,
    protections: Vec<Protection>,
    certificates: Vec<Certificate>,
) -> Served {
    Served {
        engine,
        name: session.name().to_string(),
        facts: session.facts(),
        kv_tokens: session.host().kv_blocks() * device::BLOCK_TOKENS,
        numerics_id: session.numerics_id(),
        environment_id: session.environment_id(),
        protection: default,
        certified: certified(session, &protections, &certificates),
        protections,
        promises: promises(session, certificates),
        version: json!({
            "version": env!("CARGO_PKG_VERSION"),
            "build": identity::BUILD,
            "numerics_version": numerics::NUMERICS_VERSION,
            "profile": session.settings().profile().name(),
            "device": session.host().info().name,
            "model": session.name(),
            "numerics_id": session.numerics_id(),
            "environment_id": session.environment_id(),
        }),
        template: None,
        tokenizer: None,
        grammars: Default::default(),
    }
}

fn options(args: &ServeArgs) -> Result<Options> {
    let seconds = |s: u32| Duration::from_secs(s.into());
    if args.max_head < server::LEAST_HEAD as u64 {
        bail!("--max-head {}: at least 8KiB is needed", args.max_head);
    }
    Ok(Options {
        connections: args.max_connections as usize,
        head_bytes: args.max_head as usize,
        head_time: seconds(args.head_time),
        body_bytes: args.max_body as usize,
        max_output_tokens: args.max_output_tokens as usize,
        request_time: seconds(args.request_time),
        body_time: seconds(args.body_time),
        write_time: seconds(args.write_time),
        backlog: args.max_backlog as usize,
        drain_time: seconds(args.drain_time),
        allow_downgrade: args.allow_downgrade,
        keys: keys(args)?,
    })
}

/// The keys' hashes, from a file or the environment, one a line. The keys themselves are not kept.
fn keys(args: &ServeArgs) -> Result<Vec<blake3::Hash>> {
    let text = match (&args.api_keys, std::env::var("BLOCKLOCK_API_KEYS")) {
        (Some(path), _) => crate::input::read_text(path, 1 << 20)?,
        (None, Ok(text)) => text,
        (None, Err(std::env::VarError::NotPresent)) => return Ok(Vec::new()),
        (None, Err(_)) => bail!("BLOCKLOCK_API_KEYS is not UTF-8"),
    };
    let keys: Vec<blake3::Hash> = text
        .lines()
        .map(str::trim)
        .filter(|key| !key.is_empty())
        .map(|key| blake3::hash(key.as_bytes()))
        .collect();
    if keys.is_empty() {
        bail!("no API key in --api-keys or BLOCKLOCK_API_KEYS; one a line is expected");
    }
    Ok(keys)
}

/// What the certificates of the locked ones among `protections` say, counted.
fn certified(
    session: &Session,
    protections: &[Protection],
    certificates: &[Certificate],
) -> Vec<(Protection, Certified)> {
    let planners = engine::protections::all(&session.facts(), session.host().locked());
    let locked = planners
        .iter()
        .filter(|(p, planner)| protections.contains(p) && !planner.rungs().is_empty());
    locked
        .map(|(p, planner)| {
            let mut counted = Certified::default();
            for prompt in planner.rungs() {
                let geometry = planner.certified_as(prompt);
                let mut own = certificates.iter().filter(|c| c.protection == p.name());
                match own.find(|c| c.geometry == geometry) {
                    Some(c) if c.broken_by.is_none() => counted.held += 1,
                    Some(_) => counted.broken += 1,
                    None => counted.unknown += 1,
                }
            }
            (*p, counted)
        })
        .collect()
}

/// What a request is promised: for a locked protection what the certificate of its geometry says.
fn promises(session: &Session, certificates: Vec<Certificate>) -> Box<server::Promises> {
    let (facts, locked) = (session.facts(), session.settings().locked());
    let (numerics, environment) = (session.numerics_id(), session.environment_id());
    let known: HashMap<(String, String), Certificate> = certificates
        .into_iter()
        .map(|c| ((c.protection.clone(), c.geometry.clone()), c))
        .collect();
    Box::new(
        move |protection: Protection, prompt: &[u32], sampling: &SamplingParams| {
            let planners = engine::protections::all(&facts, &locked);
            let planner = planners.into_iter().find(|(p, _)| *p == protection);
            let (geometry, certified_as) = planner.map_or_else(Default::default, |(_, planner)| {
                (
                    planner.geometry(prompt.len()),
                    planner.certified_as(prompt.len()),
                )
            });
            let (promised, reason) = match protection {
                Protection::None => (false, "protection none promises nothing".to_string()),
                Protection::Invariant => (
                    true,
                    "contract kernels: bits depend on the request alone".into(),
                ),
                locked => match known.get(&(locked.name().into(), certified_as.clone())) {
                    Some(Certificate {
                        broken_by: Some(by),
                        ..
                    }) => (
                        false,
                        format!("in {certified_as}, {by} changed a target's bits on this device"),
                    ),
                    Some(_) => (true, format!("certified on this device: {certified_as}")),
                    None => (
                        false,
                        format!(
                            "{certified_as} has no certificate on this device yet (`blocklock inspect --certify` makes one)"
                        ),
                    ),
                },
            };
            let locked =
                (!geometry.is_empty()).then_some((environment.as_str(), geometry.as_str()));
            let key =
                identity::reproducibility_key(&numerics, protection, locked, prompt, sampling);
            Promise {
                key: key.filter(|_| promised).map(|k| k.to_string()),
                geometry,
                promised,
                reason,
            }
        },
    )
}
