//! Stop strings: text is let through only as far as it cannot be the start of one.

/// Watches a growing text for stop strings.
#[derive(Debug, Clone, Default)]
pub struct StopScanner {
    stops: Vec<String>,
    /// Text not let through yet: it may be the start of a stop string.
    held: String,
    stopped: bool,
}

impl StopScanner {
    /// Watches for these; empty ones are ignored.
    pub fn new(stops: &[String]) -> Self {
        Self {
            stops: stops.iter().filter(|s| !s.is_empty()).cloned().collect(),
            ..Self::default()
        }
    }

    /// Takes more text and returns what may be shown. After a stop string nothing more is.
    pub fn push(&mut self, text: &str) -> String {
        if self.stopped {
            return String::new();
        }
        self.held.push_str(text);
        let hit = self
            .stops
            .iter()
            .filter_map(|s| self.held.find(s.as_str()))
            .min();
        if let Some(at) = hit {
            self.held.truncate(at);
            self.stopped = true;
            return std::mem::take(&mut self.held);
        }
        let keep = self
            .held
            .char_indices()
            .map(|(i, _)| i)
            .find(|&i| self.stops.iter().any(|s| s.starts_with(&self.held[i..])))
            .unwrap_or(self.held.len());
        let rest = self.held.split_off(keep);
        std::mem::replace(&mut self.held, rest)
    }

    /// What was held back, once no more text comes.
    pub fn finish(&mut self) -> String {
        match self.stopped {
            true => String::new(),
            false => std::mem::take(&mut self.held),
        }
    }

    /// Whether a stop string was found.
    pub fn stopped(&self) -> bool {
        self.stopped
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Feeds `text` in pieces of `size` characters.
    fn run(text: &str, stops: &[&str], size: usize) -> (String, bool) {
        let stops: Vec<String> = stops.iter().map(|s| s.to_string()).collect();
        let mut scanner = StopScanner::new(&stops);
        let chars: Vec<char> = text.chars().collect();
        let mut out = String::new();
        for piece in chars.chunks(size) {
            out += &scanner.push(&piece.iter().collect::<String>());
        }
        out += &scanner.finish();
        (out, scanner.stopped())
    }

    #[test]
    fn a_stop_string_is_found_however_the_text_is_cut() {
        for size in 1..8 {
            assert_eq!(run("one\n\ntwo", &["\n\n"], size), ("one".into(), true));
            assert_eq!(run("one\ntwo", &["\n\n"], size), ("one\ntwo".into(), false));
            assert_eq!(run("aab", &["aab"], size), ("".into(), true));
            assert_eq!(run("aaab", &["aab"], size), ("a".into(), true));
            assert_eq!(run("héé!", &["é!"], size), ("hé".into(), true));
            assert_eq!(run("tail\n", &["\n\n", ""], size), ("tail\n".into(), false));
        }
    }

    #[test]
    fn the_earliest_of_several_wins() {
        assert_eq!(
            run("a STOP b END", &["END", "STOP"], 100),
            ("a ".into(), true)
        );
    }
}
