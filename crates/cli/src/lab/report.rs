//! What a study hands over, and the three forms it takes: text, JSON, files.

use super::LabArgs;
use super::plot::Plot;
use crate::args::Global;
use crate::{Outcome, output};
use anyhow::{Context, Result};
use serde::Serialize;
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};

/// One value of a table.
#[derive(Debug, Clone, PartialEq)]
pub enum Cell {
    /// A word.
    Word(String),
    /// A whole number.
    Count(u64),
    /// A number that was chosen, such as 1e-4: shown in full.
    Exact(f64),
    /// A number that was measured: shown to three digits.
    Measured(f64),
    /// A measured share of 1: shown in per cent.
    Share(f64),
    /// Nothing there.
    Empty,
}

impl Cell {
    fn text(&self) -> String {
        match self {
            Self::Word(word) => word.clone(),
            Self::Count(n) => output::count(*n),
            Self::Exact(x) => number(*x),
            Self::Measured(0.0) => "0".into(),
            Self::Measured(x) => format!("{x:.2e}"),
            Self::Share(x) => percent(*x),
            Self::Empty => "-".into(),
        }
    }

    fn json(&self) -> Value {
        match self {
            Self::Word(word) => word.as_str().into(),
            Self::Count(n) => (*n).into(),
            Self::Exact(x) | Self::Measured(x) | Self::Share(x) => (*x).into(),
            Self::Empty => Value::Null,
        }
    }

    fn csv(&self) -> String {
        match self {
            Self::Word(w) if w.contains([',', '"', '\n']) => {
                format!("\"{}\"", w.replace('"', "\"\""))
            }
            Self::Word(word) => word.clone(),
            Self::Count(n) => n.to_string(),
            Self::Exact(x) | Self::Measured(x) | Self::Share(x) => number(*x),
            Self::Empty => String::new(),
        }
    }
}

/// A number in full, the shorter way.
pub fn number(x: f64) -> String {
    let (plain, short) = (format!("{x}"), format!("{x:e}"));
    if plain.len() <= short.len() + 2 {
        plain
    } else {
        short
    }
}

/// A share in per cent, to three digits.
pub fn percent(x: f64) -> String {
    let p = 100.0 * x;
    let digits = match p {
        0.0 => return "0 %".into(),
        _ if p >= 99.95 => 0,
        _ if p >= 9.995 => 1,
        _ if p >= 0.9995 => 2,
        _ if p >= 0.09995 => 3,
        _ if p >= 0.009995 => 4,
        _ if p >= 0.0009995 => 5,
        _ => return format!("{p:.2e} %"),
    };
    format!("{p:.digits$} %")
}

/// A table: a heading for people and a key for programs over each column.
#[derive(Debug)]
pub struct Table {
    name: &'static str,
    columns: Vec<(&'static str, &'static str)>,
    rows: Vec<Vec<Cell>>,
    /// Rows in the text.
    shown: usize,
}

impl Table {
    /// An empty table; `columns` are (key, heading).
    pub fn new(name: &'static str, columns: &[(&'static str, &'static str)]) -> Self {
        Self {
            name,
            columns: columns.to_vec(),
            rows: Vec::new(),
            shown: usize::MAX,
        }
    }

    /// The same; the text has the first rows only, and nothing of a table without.
    pub fn shown(mut self, rows: usize) -> Self {
        self.shown = rows;
        self
    }

    /// Adds a row, a cell a column.
    pub fn push(&mut self, row: Vec<Cell>) {
        debug_assert_eq!(row.len(), self.columns.len());
        self.rows.push(row);
    }

    fn text(&self) -> String {
        let head = self.columns.iter().map(|c| c.1.to_string()).collect();
        let shown = self.rows.iter().take(self.shown);
        let rows = shown.map(|r| r.iter().map(Cell::text).collect());
        output::table(&std::iter::once(head).chain(rows).collect::<Vec<_>>())
    }

    fn csv(&self) -> String {
        let line = |cells: Vec<String>| cells.join(",") + "\n";
        let head = line(self.columns.iter().map(|c| c.0.to_string()).collect());
        let rows = self
            .rows
            .iter()
            .map(|r| line(r.iter().map(Cell::csv).collect()));
        std::iter::once(head).chain(rows).collect()
    }

    fn json(&self) -> Value {
        let keys = || self.columns.iter().map(|c| c.0.to_string());
        let row = |r: &Vec<Cell>| keys().zip(r.iter().map(Cell::json)).collect::<Map<_, _>>();
        self.rows.iter().map(row).collect()
    }
}

/// What a study found.
pub struct Report {
    /// Its name, which also names its files: the first table is NAME.csv, another NAME-TABLE.csv.
    pub study: &'static str,
    /// What it ran on, where that is a model: fields of the JSON document.
    pub about: Value,
    /// Every option in force.
    pub options: Value,
    /// What the numbers rest on, a sentence each.
    pub assumptions: Vec<String>,
    /// What they say, a sentence each.
    pub findings: Vec<String>,
    /// The numbers.
    pub tables: Vec<Table>,
    /// The pictures; each is FILE.svg.
    pub pictures: Vec<Plot>,
}

impl Report {
    /// A report without numbers yet.
    pub fn new(study: &'static str, args: &impl Serialize) -> Result<Self> {
        Ok(Self {
            study,
            about: json!({}),
            options: serde_json::to_value(args).context("cannot write JSON")?,
            assumptions: Vec::new(),
            findings: Vec::new(),
            tables: Vec::new(),
            pictures: Vec::new(),
        })
    }

    /// Writes the files, if a folder is given, then prints text or JSON.
    pub fn emit(&self, global: &Global, folder: Option<&Folder>) -> Result<Outcome> {
        let files = match folder {
            Some(folder) => self.write(folder)?,
            None => Vec::new(),
        };
        if global.json {
            output::print_json(&self.json(&files))?;
        } else {
            output::print(&self.text())?;
            if !global.quiet {
                files
                    .iter()
                    .for_each(|f| output::note(&format!("wrote {f}")));
            }
        }
        Ok(Outcome::Done)
    }

    fn text(&self) -> String {
        let mut out = String::new();
        for table in self.tables.iter().filter(|t| t.shown > 0) {
            out += &table.text();
            out.push('\n');
        }
        for finding in &self.findings {
            out += &wrapped(finding, "", 120);
        }
        out += "\nAssumed:\n";
        for assumption in &self.assumptions {
            out += &wrapped(assumption, "- ", 120);
        }
        out
    }

    fn json(&self, files: &[String]) -> Value {
        let tables: Map<_, _> = self
            .tables
            .iter()
            .map(|t| (t.name.to_string(), t.json()))
            .collect();
        let mut document = json!({
            "study": self.study, "options": self.options, "assumptions": self.assumptions, "findings": self.findings,
            "tables": tables, "files": files,
        });
        if let (Some(document), Some(about)) = (document.as_object_mut(), self.about.as_object()) {
            document.extend(about.clone());
        }
        document
    }

    fn write(&self, folder: &Folder) -> Result<Vec<String>> {
        let mut files = Vec::new();
        for picture in &self.pictures {
            files.push(folder.write(&format!("{}.svg", picture.file), &picture.svg()?)?);
        }
        for (i, table) in self.tables.iter().enumerate() {
            let name = match i {
                0 => format!("{}.csv", self.study),
                _ => format!("{}-{}.csv", self.study, table.name),
            };
            files.push(folder.write(&name, &table.csv())?);
        }
        Ok(files)
    }
}

/// Text in lines of at most `width` characters, the first after `first`, the others indented as much.
fn wrapped(text: &str, first: &str, width: usize) -> String {
    let indent = " ".repeat(first.chars().count());
    let mut out = first.to_string();
    let mut at = indent.len();
    for (i, word) in text.split(' ').enumerate() {
        let long = word.chars().count();
        if i > 0 && at + 1 + long > width {
            out += &format!("\n{indent}");
            at = indent.len();
        } else if i > 0 {
            out.push(' ');
            at += 1;
        }
        out += word;
        at += long;
    }
    out + "\n"
}

/// A folder that files can be written into.
pub struct Folder(PathBuf);

impl Folder {
    /// The folder of `--out`, made if need be and tried, so that a study does not end in a refusal.
    pub fn open(args: &LabArgs) -> Result<Option<Self>> {
        let Some(path) = &args.out else {
            return Ok(None);
        };
        let shown = path.display();
        std::fs::create_dir_all(path)
            .with_context(|| format!("--out {shown}: cannot create this folder"))?;
        tempfile::tempfile_in(path)
            .with_context(|| format!("--out {shown}: cannot write into this folder"))?;
        Ok(Some(Self(path.clone())))
    }

    fn write(&self, name: &str, content: &str) -> Result<String> {
        let path: &Path = &self.0.join(name);
        std::fs::write(path, content)
            .with_context(|| format!("--out: cannot write {}", path.display()))?;
        Ok(path.display().to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cells_for_people_and_programs() {
        for (cell, text, csv) in [
            (Cell::Word("a,\"b".into()), "a,\"b", "\"a,\"\"b\""),
            (Cell::Count(12_000), "12,000", "12000"),
            (Cell::Exact(1e-8), "1e-8", "1e-8"),
            (Cell::Exact(0.25), "0.25", "0.25"),
            (Cell::Measured(1.2345e-7), "1.23e-7", "1.2345e-7"),
            (Cell::Measured(0.0), "0", "0"),
            (Cell::Share(0.023714), "2.37 %", "0.023714"),
            (Cell::Share(0.5), "50.0 %", "0.5"),
            (Cell::Share(1.0), "100 %", "1"),
            (Cell::Share(0.002), "0.200 %", "0.002"),
            (Cell::Share(2e-5), "0.00200 %", "2e-5"),
            (Cell::Share(2e-7), "2.00e-5 %", "2e-7"),
            (Cell::Empty, "-", ""),
        ] {
            assert_eq!((cell.text().as_str(), cell.csv().as_str()), (text, csv));
        }
    }

    #[test]
    fn long_sentences_are_wrapped() {
        assert_eq!(wrapped("one two three", "- ", 10), "- one two\n  three\n");
        assert_eq!(wrapped("one", "", 2), "one\n");
    }
}
