//! The `blocklock` command: parse, validate into a typed plan, run. One exit: 0 done or held, 1 a check found a
//! difference, 2 the call or its input was wrong.

mod args;
mod batch;
mod bench;
mod bench_beside;
mod bench_cases;
mod bench_http;
mod bench_kernels;
mod bench_serving;
mod certificates;
mod certification;
mod check;
mod download;
mod generate;
mod goldens;
mod identity;
mod input;
mod inspect;
mod kernels;
mod lab;
mod log;
mod margin;
mod margins;
mod output;
mod progress;
mod pull;
mod sampling;
mod score;
mod selftest;
mod serve;
mod session;
mod settings;
mod timed;
mod values;

use args::{Cli, Command};
use clap::{CommandFactory, Parser};
use std::process::ExitCode;
use std::sync::LazyLock;

/// How a command that ran to its end ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outcome {
    /// Done, or the check held.
    Done,
    /// A check found a difference.
    Differs,
}

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return usage(error),
    };
    log::start(&cli);
    let ended = run(cli);
    log::finish();
    match ended {
        Ok(Outcome::Done) => ExitCode::SUCCESS,
        Ok(Outcome::Differs) => ExitCode::from(1),
        Err(error) if output::is_closed_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => fail(&output::in_full(&error)),
    }
}

fn run(cli: Cli) -> anyhow::Result<Outcome> {
    match cli.command {
        Command::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "blocklock", &mut script);
            output::print(&String::from_utf8_lossy(&script))?;
            Ok(Outcome::Done)
        }
        Command::Generate(args) => generate::run(&cli.global, &args),
        Command::Serve(args) => serve::run(&cli.global, &args),
        Command::Check(args) => check::run(&cli.global, &args),
        Command::Margin(args) => margin::run(&cli.global, &args),
        Command::Bench(args) => bench::run(&cli.global, &args),
        Command::Lab { command } => lab::run(&cli.global, &command),
        Command::Inspect(args) => inspect::run(&cli.global, &args),
        Command::Pull(args) => pull::run(&cli.global, &args),
        Command::Selftest(args) => selftest::run(&cli.global, &args),
        Command::Kernels { command } => kernels::run(&cli.global, &command),
    }
}

/// The package's version and that of the numerics contract.
fn version() -> &'static str {
    static TEXT: LazyLock<String> = LazyLock::new(|| {
        format!(
            "{} (numerics {})",
            env!("CARGO_PKG_VERSION"),
            numerics::NUMERICS_VERSION
        )
    });
    &TEXT
}

/// One line on standard error, exit code 2.
fn fail(message: &str) -> ExitCode {
    let line = message.split_whitespace().collect::<Vec<_>>().join(" ");
    output::note(&format!("blocklock: {line}"));
    ExitCode::from(2)
}

/// What may follow the commands given.
fn missing_command() -> String {
    let all = Cli::command();
    let (mut at, mut name) = (&all, "blocklock".to_string());
    for word in std::env::args().skip(1) {
        if let Some(next) = at.find_subcommand(&word) {
            (at, name) = (next, format!("{name} {word}"));
        }
    }
    let allowed: Vec<&str> = at.get_subcommands().map(|c| c.get_name()).collect();
    format!(
        "no command given; allowed: {} (see {name} --help)",
        allowed.join(", ")
    )
}

/// Help and versions go to standard output; a wrong call is one line like every other error.
fn usage(error: clap::Error) -> ExitCode {
    use clap::error::ErrorKind;
    let text = error.render().to_string();
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => {
            let _ = output::print(&text);
            ExitCode::SUCCESS
        }
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand | ErrorKind::MissingSubcommand => {
            fail(&missing_command())
        }
        _ => {
            let text = text.strip_prefix("error: ").unwrap_or(&text);
            let end = text
                .find("\n\nUsage:")
                .or_else(|| text.find("\n\nFor more information"))
                .unwrap_or(text.len());
            fail(&text[..end])
        }
    }
}
