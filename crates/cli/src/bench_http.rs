//! `bench --http`: what HTTP adds to a request and to each streamed token over the engine that answers it.

use crate::args::{BenchArgs, Global};
use crate::bench_cases::Prompts;
use crate::certificates::Certificates;
use crate::output;
use crate::progress;
use crate::serve;
use crate::session::Session;
use crate::settings::Settings;
use anyhow::{Context, Result, bail};
use audit::{median, random_prompt};
use engine::{EngineHandle, EngineThread, Event, FinishReason, Protection, Request};
use serde::Serialize;
use serde_json::json;
use server::{Options, Server};
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

/// Medians of one protection, in milliseconds from sending to the end.
#[derive(Debug, Clone, Serialize)]
struct Cell {
    protection: &'static str,
    prompt_tokens: usize,
    max_tokens: usize,
    /// One token, of the engine alone and through HTTP.
    one_token_engine_ms: f64,
    one_token_http_ms: f64,
    /// The median of the differences of neighbouring runs.
    added_per_request_ms: f64,
    /// All tokens, streamed.
    stream_engine_ms: f64,
    stream_http_ms: f64,
    added_per_streamed_token_us: f64,
}

/// The two ways to have an answer. The client of the second does hardly more than read, so that its own work is not
/// taken for the server's.
struct Ways {
    engine: EngineHandle,
    address: SocketAddr,
    connection: TcpStream,
    answer: Vec<u8>,
}

/// Measures each protection, the two ways in turns, and reports.
pub fn run(
    global: &Global,
    settings: &Settings,
    session: &Session,
    protections: &[Protection],
    args: &BenchArgs,
) -> Result<()> {
    let prompt = Prompts::new(&args.prompt_tokens).of(0);
    let new = args.max_tokens as usize;
    let mut certificates = Certificates::new(session);
    let mut held = Vec::new();
    for &protection in protections {
        held.extend(certificates.of(protection, prompt)?);
    }
    let mut engine = session.engine(settings.engine())?;
    held.iter().for_each(|c| engine.adopt(c));
    let engine = EngineThread::spawn(engine).context("cannot start the engine's thread")?;
    let day = Duration::from_secs(86_400);
    let server = Server::bind(
        (Ipv4Addr::LOCALHOST, 0).into(),
        Options {
            connections: 16,
            head_bytes: 1 << 16,
            head_time: day,
            body_bytes: 1 << 24,
            max_output_tokens: new,
            request_time: day,
            body_time: day,
            write_time: day,
            backlog: new,
            drain_time: day,
            allow_downgrade: false,
            keys: Vec::new(),
        },
    )
    .context("cannot listen on this machine's own address")?;
    let first = *protections.first().context("no protection to measure")?;
    server.ready(serve::served(
        session,
        engine.clone(),
        first,
        protections.to_vec(),
        held,
    ));
    let address = server.address();
    let connection = TcpStream::connect(address).context("cannot reach the server")?;
    connection.set_nodelay(true)?;
    let mut ways = Ways {
        engine,
        address,
        connection,
        answer: vec![0; 1 << 16],
    };
    let bar = progress::bar(global, u64::from(args.repeats) * protections.len() as u64);
    let mut cells = Vec::new();
    for &protection in protections {
        let mut times: [Vec<f64>; 4] = Default::default();
        for i in 0..=u64::from(args.repeats) {
            bar.set_message(protection.name());
            let vocab = session.facts().vocab;
            let prompts = [0, 1, 2, 3].map(|way| random_prompt(4 * i + way, prompt, vocab));
            let [a, b, c, d] = prompts;
            let took = [
                ways.alone(protection, a, 1)?,
                ways.over_http(protection, &b, 1)?,
                ways.alone(protection, c, new)?,
                ways.over_http(protection, &d, new)?,
            ];
            if i > 0 {
                // The first of each warms caches and opens the connection.
                times.iter_mut().zip(took).for_each(|(t, ms)| t.push(ms));
                bar.inc(1);
            }
        }
        let added = |engine: &[f64], http: &[f64]| {
            let mut added: Vec<f64> = engine.iter().zip(http).map(|(e, h)| h - e).collect();
            median(&mut added)
        };
        // Before the medians, which reorder.
        let per_request = added(&times[0], &times[1]);
        let per_token = added(&times[2], &times[3]) * 1e3 / new as f64;
        cells.push(Cell {
            protection: protection.name(),
            prompt_tokens: prompt,
            max_tokens: new,
            one_token_engine_ms: median(&mut times[0]),
            one_token_http_ms: median(&mut times[1]),
            added_per_request_ms: per_request,
            stream_engine_ms: median(&mut times[2]),
            stream_http_ms: median(&mut times[3]),
            added_per_streamed_token_us: per_token,
        });
    }
    bar.finish_and_clear();
    if global.json {
        let mut document = session.describe();
        document["threads"] = settings.threads.value.into();
        document["repeats"] = args.repeats.into();
        document["http"] = json!(cells);
        return output::print_json(&document);
    }
    let mut out = format!(
        "{:<10} {:>22} {:>12} {:>26} {:>14}\n",
        "protection", "1 token: engine, HTTP", "added", "stream: engine, HTTP", "added a token"
    );
    for c in &cells {
        out += &format!(
            "{:<10} {:>22} {:>12} {:>26} {:>14}\n",
            c.protection,
            format!(
                "{:.2}, {:.2} ms",
                c.one_token_engine_ms, c.one_token_http_ms
            ),
            format!("{:.3} ms", c.added_per_request_ms),
            format!("{:.1}, {:.1} ms", c.stream_engine_ms, c.stream_http_ms),
            format!("{:.1} us", c.added_per_streamed_token_us),
        );
    }
    output::print(&out)
}

impl Ways {
    /// Milliseconds until the engine has answered.
    fn alone(&self, protection: Protection, prompt: Vec<u32>, new: usize) -> Result<f64> {
        let start = Instant::now();
        let mut events = self.engine.submit(Request::new(prompt, protection, new))?;
        while let Some(event) = events.recv() {
            match event {
                Event::Finished {
                    reason: FinishReason::Length,
                    ..
                } => {
                    return Ok(start.elapsed().as_secs_f64() * 1e3);
                }
                Event::Finished { reason, .. } => bail!("a request ended early: {reason:?}"),
                _ => {}
            }
        }
        bail!("the engine ended unexpectedly")
    }

    /// Milliseconds until the server has: streamed, unless it is one token.
    fn over_http(&mut self, protection: Protection, prompt: &[u32], new: usize) -> Result<f64> {
        let body =
            json!({"prompt": prompt, "max_tokens": new, "temperature": 0, "ignore_eos": true,
                          "protection": protection.name(), "stream": new > 1})
            .to_string();
        let request = format!(
            "POST /v1/completions HTTP/1.1\r\nHost: {}\r\nContent-Length: {}\r\n\r\n{body}",
            self.address,
            body.len()
        );
        let start = Instant::now();
        self.connection.write_all(request.as_bytes())?;
        let mut read = 0;
        while !is_whole(&self.answer[..read]) {
            if read == self.answer.len() {
                self.answer.resize(2 * read, 0);
            }
            let more = self.connection.read(&mut self.answer[read..])?;
            if more == 0 {
                bail!("the server hung up");
            }
            read += more;
        }
        let took = start.elapsed().as_secs_f64() * 1e3;
        let answer = String::from_utf8_lossy(&self.answer[..read]);
        if !answer.starts_with("HTTP/1.1 200 ") {
            bail!("the server answered: {answer}");
        }
        // Every token's event, the first one and [DONE].
        let events = answer.matches("data: ").count();
        if new > 1 && events < new + 2 {
            bail!("{events} events for {new} tokens");
        }
        Ok(took)
    }
}

/// Whether a reply is all there: as many bytes as it said, or chunks up to the last.
fn is_whole(reply: &[u8]) -> bool {
    if reply.ends_with(b"\r\n0\r\n\r\n") {
        return true;
    }
    let text = std::str::from_utf8(reply).unwrap_or_default();
    let length = text.split_once("\r\n\r\n").and_then(|(head, body)| {
        let (_, length) = head.split_once("content-length: ")?;
        let (length, _) = length.split_once("\r\n").unwrap_or((length, ""));
        Some(body.len() >= length.parse().ok()?)
    });
    length.unwrap_or(false)
}
