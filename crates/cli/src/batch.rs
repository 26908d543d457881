//! `generate --input`: a JSONL batch. Records run together in one engine and are written, one line each and flushed,
//! as they finish. A killed batch goes on with `--resume`: whole lines of the output stay, a torn last one is dropped.

use crate::args::{GenerateArgs, Global};
use crate::certificates::Certificates;
use crate::generate::{Answer, Defaults};
use crate::input::Prompt;
use crate::output::{in_full, note};
use crate::sampling::{self, SamplingRecord};
use crate::session::{KvNeed, Opened, Session};
use crate::settings::Settings;
use crate::{Outcome, identity, progress};
use anyhow::{Context, Result, bail};
use engine::{Engine, Protection};
use serde::Deserialize;
use serde_json::{Value, json};
use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;

/// Longest input line, in bytes.
const LINE_BYTES: u64 = 16 << 20;

/// One line of the input.
#[derive(Deserialize)]
struct Record {
    id: Option<Value>,
    prompt: Option<String>,
    prompt_ids: Option<Vec<u32>>,
    messages: Option<Vec<model::Message>>,
    max_tokens: Option<u64>,
    protection: Option<String>,
    stop: Option<OneOrMany>,
    stop_ids: Option<Vec<u32>>,
    ignore_eos: Option<bool>,
    #[serde(flatten)]
    sampling: SamplingRecord,
    /// What no other field took; nothing is allowed here.
    #[serde(flatten)]
    unknown: serde_json::Map<String, Value>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum OneOrMany {
    One(String),
    Many(Vec<String>),
}

/// A line of the input, and what it is known by.
struct Line {
    /// From 1.
    number: u64,
    /// BLAKE3 of its bytes, the first 16 hexadecimal digits: on resuming, an answer belongs to this very line.
    digest: String,
    text: Result<String, String>,
}

/// A record in the engine.
struct Running {
    line: u64,
    digest: String,
    id: Value,
    prompt: Vec<u32>,
    defaults: Defaults,
    /// Its geometry has a certificate.
    certified: bool,
    answer: Answer,
}

/// Runs the batch. Exit code 2 with a summary where some records failed; the others are written all the same.
pub fn run(
    global: &Global,
    settings: &Settings,
    args: &GenerateArgs,
    input: &Path,
    defaults: &Defaults,
) -> Result<Outcome> {
    let mut lines = Lines::open(input)?;
    let (done, mut out) = open_output(args)?;
    // Any record may ask for any protection; both kinds of kernels are loaded only where one does.
    let protections = protections_in(input, defaults.protection)?;
    let session = Opened::open(settings)?.start(&protections, KvNeed::Settings)?;
    let mut engine = session.engine(settings.engine())?;
    let bar = progress::counter(global, "records");
    let mut certificates = Certificates::new(&session);
    let mut running: Vec<Running> = Vec::new();
    // A record whose geometry must be certified first, which takes an idle device.
    let mut held: Option<(Line, Result<Prepared, Failed>)> = None;
    let (mut written, mut failed, mut kept, mut more) = (0u64, 0u64, 0u64, true);
    while more || held.is_some() || !running.is_empty() {
        while running.len() < settings.max_running.value as usize {
            let (line, prepared) = if let Some(held) = held.take() {
                held
            } else if let Some(line) = lines.next_line()? {
                if let Some(digest) = done.get(&line.number) {
                    if *digest != line.digest {
                        bail!(
                            "cannot resume: line {} of {} is not the one the output answers; give another --output",
                            line.number,
                            input.display()
                        );
                    }
                    kept += 1;
                    continue;
                }
                let prepared = prepare(&session, defaults, &line);
                (line, prepared)
            } else {
                more = false;
                break;
            };
            let must_be_made =
                |p: &Prepared| certificates.must_be_made(p.defaults.protection, p.prompt.len());
            if prepared.as_ref().is_ok_and(must_be_made) {
                if !running.is_empty() {
                    held = Some((line, prepared));
                    break;
                }
                engine.clear_cache(); // certifying overwrites KV
            }
            let started = prepared.and_then(|p| p.start(&mut engine, &mut certificates, &line));
            match started {
                Ok(record) => running.push(record),
                Err(Failed { id, error }) => {
                    failed += 1;
                    written += 1;
                    write_line(
                        &mut out,
                        &json!({"line": line.number, "input_digest": line.digest, "id": id, "error": error}),
                    )?;
                }
            }
        }
        if running.is_empty() {
            continue;
        }
        for (id, event) in engine.step().context("the device failed")? {
            if let Some(record) = running.iter_mut().find(|r| r.answer.id == id) {
                record.answer.take(event, &session, &mut engine);
            }
        }
        let (ended, rest) = running.into_iter().partition(|r| r.answer.finish.is_some());
        running = rest;
        let ended: Vec<Running> = ended;
        for record in ended {
            failed += u64::from(record.answer.failure().is_some());
            written += 1;
            write_line(&mut out, &record.report(&session, global.json))?;
            bar.set_position(written + kept);
        }
    }
    bar.finish_and_clear();
    if !global.quiet {
        note(&format!(
            "{written} records written{}{}",
            if kept > 0 {
                format!(", {kept} kept from before")
            } else {
                String::new()
            },
            if failed > 0 {
                format!(", {failed} of them errors")
            } else {
                String::new()
            },
        ));
    }
    if failed > 0 {
        bail!(
            "{failed} of {} records failed; their lines in the output have \"error\"",
            written + kept
        );
    }
    Ok(Outcome::Done)
}

/// A record that did not get into the engine, with its id as far as it is known.
struct Failed {
    id: Value,
    error: String,
}

/// A record ready for the engine.
struct Prepared<'a> {
    session: &'a Session,
    id: Value,
    prompt: Vec<u32>,
    defaults: Defaults,
}

/// Parses and validates one record.
fn prepare<'a>(
    session: &'a Session,
    defaults: &Defaults,
    line: &Line,
) -> Result<Prepared<'a>, Failed> {
    let (id, prompt, defaults) = parse(session, defaults, line)?;
    Ok(Prepared {
        session,
        id,
        prompt,
        defaults,
    })
}

/// A record's id and prompt, and the defaults as it changes them.
fn parse(
    opened: &Opened,
    defaults: &Defaults,
    line: &Line,
) -> Result<(Value, Vec<u32>, Defaults), Failed> {
    let failed = |id, error| Failed { id, error };
    let text = line
        .text
        .as_ref()
        .map_err(|e| failed(Value::Null, e.clone()))?;
    let record: Record = serde_json::from_str(text).map_err(|e| {
        let id = serde_json::from_str::<Value>(text)
            .map(|v| v["id"].clone())
            .unwrap_or_default();
        failed(id, format!("line {} is not a request: {e}", line.number))
    })?;
    let id = record.id.clone().unwrap_or(Value::Null);
    let prepared = record.prepare(opened, defaults);
    let (prompt, defaults) = prepared.map_err(|e| failed(id.clone(), in_full(&e)))?;
    Ok((id, prompt, defaults))
}

/// A request of a batch that is read whole.
pub struct BatchRequest {
    /// Its line, from 1.
    pub line: u64,
    /// The id it has there.
    pub id: Value,
    /// Token ids.
    pub prompt: Vec<u32>,
    /// The defaults as its line changes them.
    pub defaults: Defaults,
}

/// All requests of a batch; the first line that is none is an error.
pub fn read_all(path: &Path, opened: &Opened, defaults: &Defaults) -> Result<Vec<BatchRequest>> {
    let mut lines = Lines::open(path)?;
    let mut requests = Vec::new();
    while let Some(line) = lines.next_line()? {
        let at = |e: String| match e.starts_with("line ") {
            true => anyhow::anyhow!("{}: {e}", path.display()),
            false => anyhow::anyhow!("{}: line {}: {e}", path.display(), line.number),
        };
        let (id, prompt, defaults) =
            parse(opened, defaults, &line).map_err(|failed| at(failed.error))?;
        opened
            .check(&prompt, defaults.max_tokens)
            .map_err(|e| at(in_full(&e)))?;
        requests.push(BatchRequest {
            line: line.number,
            id,
            prompt,
            defaults,
        });
    }
    if requests.is_empty() {
        bail!(
            "{} holds no request; at least one line is needed",
            path.display()
        );
    }
    Ok(requests)
}

impl Prepared<'_> {
    /// Certifies its geometry, where that is to be done, and queues it.
    fn start(
        self,
        engine: &mut Engine,
        certificates: &mut Certificates,
        line: &Line,
    ) -> Result<Running, Failed> {
        let mut submit = || {
            let certificate = certificates.of(self.defaults.protection, self.prompt.len())?;
            certificate.iter().for_each(|c| engine.adopt(c));
            let answer = Answer::submit(engine, self.session, &self.prompt, &self.defaults, 0)?;
            Ok((certificate.is_some(), answer))
        };
        match submit() {
            Ok((certified, answer)) => Ok(Running {
                line: line.number,
                digest: line.digest.clone(),
                id: self.id,
                prompt: self.prompt,
                defaults: self.defaults,
                certified,
                answer,
            }),
            Err(e) => {
                let e: anyhow::Error = e;
                Err(Failed {
                    id: self.id,
                    error: in_full(&e),
                })
            }
        }
    }
}

impl Record {
    /// The prompt, and the defaults as this record changes them.
    fn prepare(self, opened: &Opened, defaults: &Defaults) -> Result<(Vec<u32>, Defaults)> {
        if let Some(name) = self.unknown.keys().next() {
            bail!("unknown field '{name}'; allowed: see blocklock generate --help");
        }
        let given = [
            self.prompt.is_some(),
            self.prompt_ids.is_some(),
            self.messages.is_some(),
        ];
        if given.iter().filter(|g| **g).count() != 1 {
            bail!("exactly one of prompt, prompt_ids and messages is allowed");
        }
        let mut own = defaults.clone();
        own.sampling = self.sampling.over(&defaults.sampling)?;
        if let Some(n) = self.max_tokens {
            if !(1..=1_000_000).contains(&n) {
                bail!("max_tokens is {n}: 1 to 1000000 is allowed");
            }
            own.max_tokens = n as usize;
        }
        if let Some(name) = &self.protection {
            own.protection = protection(name)?;
        }
        match self.stop {
            Some(OneOrMany::One(stop)) => own.stop = vec![stop],
            Some(OneOrMany::Many(stops)) => own.stop = stops,
            None => {}
        }
        own.stop_ids = self.stop_ids.unwrap_or(own.stop_ids);
        own.ignore_eos = self.ignore_eos.unwrap_or(own.ignore_eos);
        let prompt = match (self.prompt, self.prompt_ids, self.messages) {
            (Some(text), ..) => opened.prompt_ids(&Prompt::Text(text), &own)?,
            (_, Some(ids), _) => opened.prompt_ids(&Prompt::Ids(ids), &own)?,
            (_, _, messages) => opened.chat_ids(&messages.unwrap_or_default(), own.date)?,
        };
        Ok((prompt, own))
    }
}

impl Running {
    fn report(&self, session: &Session, full: bool) -> Value {
        let mut line = json!({
            "line": self.line,
            "input_digest": self.digest,
            "id": self.id,
        });
        if let Some(why) = self.answer.failure() {
            line["error"] = why.into();
            return line;
        }
        line["text"] = json!(self.answer.text);
        line["finish_reason"] = self.answer.finish_name().into();
        line["token_ids"] = json!(
            self.answer
                .steps
                .iter()
                .map(|s| s.token)
                .collect::<Vec<_>>()
        );
        let Defaults {
            protection,
            sampling,
            ..
        } = &self.defaults;
        let numerics_id = session.numerics_id();
        let locked = session.locked_facts(*protection, self.prompt.len());
        let key = identity::reproducibility_key(
            &numerics_id,
            *protection,
            locked.as_ref().map(|(e, g)| (e.as_str(), g.as_str())),
            &self.prompt,
            sampling,
        );
        line["prompt_tokens"] = self.prompt.len().into();
        line["protection"] = protection.name().into();
        if let Some((_, geometry)) = locked {
            line["geometry"] = geometry.into();
            line["certified"] = self.certified.into();
        }
        line["sampling"] = sampling::to_json(sampling);
        line["numerics_id"] = numerics_id.into();
        line["environment_id"] = session.environment_id().into();
        line["reproducibility_key"] = json!(key.map(|k| k.to_string()));
        if full {
            line["steps"] = json!(self.answer.steps_json(session));
        }
        line
    }
}

fn protection(name: &str) -> Result<Protection> {
    match Protection::ALL.into_iter().find(|p| p.name() == name) {
        Some(protection) => Ok(protection),
        None => {
            let allowed = Protection::ALL.map(|p| p.name()).join(", ");
            bail!("protection is '{name}', but must be one of {allowed}")
        }
    }
}

/// Input lines, numbered; blank ones are passed over.
struct Lines {
    reader: Box<dyn BufRead>,
    name: String,
    number: u64,
}

impl Lines {
    fn open(path: &Path) -> Result<Self> {
        let name = path.display().to_string();
        let reader: Box<dyn BufRead> = if path == Path::new("-") {
            Box::new(BufReader::new(std::io::stdin()))
        } else {
            if path.is_dir() {
                bail!("cannot read {name}: it is a directory, but a file is needed");
            }
            let file = File::open(path).map_err(|e| anyhow::anyhow!("cannot read {name}: {e}"))?;
            Box::new(BufReader::new(file))
        };
        Ok(Self {
            reader,
            name,
            number: 0,
        })
    }

    fn next_line(&mut self) -> Result<Option<Line>> {
        loop {
            let mut bytes = Vec::new();
            let read = (&mut self.reader)
                .take(LINE_BYTES)
                .read_until(b'\n', &mut bytes)
                .with_context(|| format!("cannot read {}", self.name))?;
            if read == 0 {
                return Ok(None);
            }
            self.number += 1;
            if read as u64 == LINE_BYTES && bytes.last() != Some(&b'\n') {
                bail!(
                    "line {} of {} is longer than {LINE_BYTES} bytes, the limit",
                    self.number,
                    self.name
                );
            }
            if bytes.iter().all(u8::is_ascii_whitespace) {
                continue;
            }
            let digest = blake3::hash(bytes.trim_ascii()).to_hex()[..16].to_string();
            let number = self.number;
            let text = String::from_utf8(bytes).map_err(|e| {
                format!(
                    "line {number} is not UTF-8: bad byte at offset {}",
                    e.utf8_error().valid_up_to()
                )
            });
            return Ok(Some(Line {
                number,
                digest,
                text,
            }));
        }
    }
}

/// Protections the batch may need: the default, and any other whose name occurs in a regular file's records. Standard
/// input and pipes can't be read twice, so there all are loaded.
fn protections_in(input: &Path, default: Protection) -> Result<Vec<Protection>> {
    let mut found = vec![default];
    if !input.is_file() {
        found.extend(Protection::ALL);
    } else {
        let mut lines = Lines::open(input)?;
        while let Some(line) = lines.next_line()? {
            let named = line
                .text
                .ok()
                .and_then(|t| serde_json::from_str::<Value>(&t).ok());
            if let Some(name) = named.as_ref().and_then(|v| v["protection"].as_str())
                && let Ok(protection) = protection(name)
            {
                found.push(protection);
            }
        }
    }
    found.sort();
    found.dedup();
    Ok(found)
}

type Done = HashMap<u64, String>;

/// The output to append to, and the input lines it already answers.
fn open_output(args: &GenerateArgs) -> Result<(Done, Box<dyn Write>)> {
    let Some(path) = &args.output else {
        return Ok((Done::new(), Box::new(std::io::stdout())));
    };
    let name = path.display();
    let mut done = Done::new();
    if args.resume && path.exists() {
        let bytes = std::fs::read(path).map_err(|e| anyhow::anyhow!("cannot read {name}: {e}"))?;
        let whole = bytes.iter().rposition(|&b| b == b'\n').map_or(0, |i| i + 1);
        for (i, line) in bytes[..whole].split(|&b| b == b'\n').enumerate() {
            if line.is_empty() {
                continue;
            }
            let value: Option<Value> = serde_json::from_slice(line).ok();
            let key = value
                .as_ref()
                .and_then(|v| Some((v["line"].as_u64()?, v["input_digest"].as_str()?.to_string())));
            let Some((number, digest)) = key else {
                bail!(
                    "cannot resume: line {} of {name} is not an answer of a batch",
                    i + 1
                );
            };
            done.insert(number, digest);
        }
        let file = OpenOptions::new()
            .append(true)
            .open(path)
            .map_err(|e| anyhow::anyhow!("cannot write {name}: {e}"))?;
        file.set_len(whole as u64)
            .map_err(|e| anyhow::anyhow!("cannot write {name}: {e}"))?;
        return Ok((done, Box::new(file)));
    }
    if path.is_dir() {
        bail!("cannot write {name}: it is a directory, but a file is needed");
    }
    let file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .open(path)
        .map_err(|e| match e.kind() {
            std::io::ErrorKind::AlreadyExists => {
                anyhow::anyhow!(
                    "{name} exists; add --resume to continue it, or give another --output"
                )
            }
            _ => anyhow::anyhow!("cannot write {name}: {e}"),
        })?;
    Ok((done, Box::new(file)))
}

/// Writes one record at once, so that a kill tears at most the last line.
fn write_line(out: &mut dyn Write, value: &Value) -> Result<()> {
    let mut line = serde_json::to_vec(value).context("cannot write JSON")?;
    line.push(b'\n');
    out.write_all(&line)
        .and_then(|()| out.flush())
        .context("cannot write the output")
}
