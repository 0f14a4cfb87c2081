//! Names for sessions whose creator gave none: an adjective and a noun, easy to read out and to
//! type.

use aws_lc_rs::rand;

/// Attempts with the words alone. Then a number follows them, with more digits each time.
const PLAIN_ATTEMPTS: u32 = 4;
/// Names that are tried; a session whose owner has all of them goes without.
const ATTEMPTS: u32 = 12;

const ADJECTIVES: [&str; 64] = [
    "agile", "amber", "ample", "apt", "arctic", "azure", "bold", "brave", "bright", "brisk",
    "calm", "candid", "clear", "clever", "coral", "cosmic", "cozy", "crisp", "curious", "daring",
    "deft", "eager", "early", "earnest", "fair", "fast", "fleet", "fluent", "fond", "frank",
    "fresh", "gentle", "glad", "golden", "grand", "happy", "hardy", "honest", "humble", "ivory",
    "jolly", "keen", "kind", "lively", "loyal", "lucid", "lunar", "mellow", "merry", "mild",
    "modest", "neat", "nimble", "noble", "olive", "patient", "placid", "polite", "proud", "quick",
    "quiet", "solar", "steady", "sunny",
];

const NOUNS: [&str; 64] = [
    "alder", "anchor", "aspen", "badger", "beacon", "birch", "bison", "breeze", "brook", "canyon",
    "cedar", "cloud", "comet", "condor", "coyote", "crane", "creek", "cypress", "delta", "dolphin",
    "dune", "ember", "falcon", "fern", "finch", "fjord", "forest", "fox", "geyser", "glacier",
    "grove", "harbor", "hawk", "heron", "island", "jaguar", "kestrel", "lagoon", "lark", "lemur",
    "lynx", "maple", "marten", "meadow", "meteor", "moose", "otter", "owl", "panda", "pebble",
    "pelican", "pine", "planet", "puffin", "quail", "raven", "river", "robin", "sparrow", "spruce",
    "summit", "tiger", "tulip", "willow",
];

/// A random name for the given attempt, counted from 0; `None` after the last one.
pub(crate) fn generate(attempt: u32) -> Option<String> {
    if attempt >= ATTEMPTS {
        return None;
    }
    let mut bytes = [0; 8];
    rand::fill(&mut bytes).expect("the system has randomness");
    let [adjective, noun, number @ ..] = bytes;
    let name = format!(
        "{}-{}",
        ADJECTIVES[usize::from(adjective) % ADJECTIVES.len()],
        NOUNS[usize::from(noun) % NOUNS.len()]
    );
    let Some(digits) = attempt.checked_sub(PLAIN_ATTEMPTS - 1).filter(|n| *n > 0) else {
        return Some(name);
    };
    let number = number
        .iter()
        .fold(0_u64, |number, byte| number << 8 | u64::from(*byte));
    Some(format!("{name}-{}", number % 10_u64.pow(digits) + 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_generated_name_is_valid_and_each_word_has_one_place() {
        for words in [ADJECTIVES, NOUNS] {
            let mut sorted = words;
            sorted.sort_unstable();
            assert_eq!(sorted, words, "the words are not in order");
            assert!(sorted.windows(2).all(|pair| pair[0] != pair[1]));
        }
        for adjective in ADJECTIVES {
            for noun in NOUNS {
                let name = format!("{adjective}-{noun}-{}", u64::MAX);
                assert!(cynode_api::is_session_name(&name), "{name}");
                let name = format!("{adjective}-{noun}");
                assert!(cynode_api::is_session_name(&name), "{name}");
            }
        }
    }

    #[test]
    fn a_number_follows_after_collisions_and_the_last_attempt_has_no_name() {
        let numbered = |attempt| {
            generate(attempt)
                .expect("a name")
                .ends_with(|c: char| c.is_ascii_digit())
        };
        assert!((0..PLAIN_ATTEMPTS).all(|attempt| !numbered(attempt)));
        assert!((PLAIN_ATTEMPTS..ATTEMPTS).all(numbered));
        assert_eq!(generate(ATTEMPTS), None);
    }
}
