//! The action for credential shapes (refuse, flag or ignore), by the channel into the sandbox.

use std::{collections::BTreeMap, fmt};

use serde::{
    Deserialize, Deserializer, Serialize,
    de::{MapAccess, Visitor},
};

/// A way for content to reach a sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Channel {
    /// Environment variables of a session, a job or a command.
    Env,
    /// Arguments of a command, and all other text of a call that is not content: names, labels,
    /// paths.
    Argv,
    /// Standard input.
    Stdin,
    /// A written file.
    Files,
    /// An unpacked tar archive.
    Archives,
    /// A unified diff.
    Patches,
    /// An artifact: it can seed a workspace.
    Seeds,
}

/// The action for content with the shape of a well-known credential, from lax to strict.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ShapeAction {
    Off,
    /// Accepts and reports the content, but refuses it in files, archives, patches and seeds at
    /// paths where programs keep live credentials.
    Flag,
    Refuse,
}

/// The setting of an operator or a project: `true`, `false`, or an action for some channels.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ShapeSetting {
    /// `true`: the default action of every channel. `false`: off everywhere.
    All(bool),
    Each(BTreeMap<Channel, ShapeAction>),
}

/// The action of every channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShapePolicy([ShapeAction; Channel::ALL.len()]);

impl Channel {
    pub const ALL: [Self; 7] = [
        Self::Env,
        Self::Argv,
        Self::Stdin,
        Self::Files,
        Self::Archives,
        Self::Patches,
        Self::Seeds,
    ];

    const fn default_action(self) -> ShapeAction {
        match self {
            Self::Env | Self::Argv | Self::Stdin => ShapeAction::Refuse,
            Self::Files | Self::Archives | Self::Patches | Self::Seeds => ShapeAction::Flag,
        }
    }
}

impl Default for ShapePolicy {
    fn default() -> Self {
        Self(Channel::ALL.map(Channel::default_action))
    }
}

impl ShapePolicy {
    pub const OFF: Self = Self([ShapeAction::Off; Channel::ALL.len()]);

    #[must_use]
    pub const fn action(&self, channel: Channel) -> ShapeAction {
        self.0[channel as usize]
    }

    #[must_use]
    pub fn is_off(&self) -> bool {
        *self == Self::OFF
    }

    /// The stricter action of each channel: a project can tighten the system's setting, never
    /// loosen it.
    #[must_use]
    pub fn tightened(mut self, by: &ShapeSetting) -> Self {
        for channel in Channel::ALL {
            let wanted = match by {
                ShapeSetting::All(true) => channel.default_action(),
                ShapeSetting::All(false) => ShapeAction::Off,
                ShapeSetting::Each(actions) => {
                    actions.get(&channel).copied().unwrap_or(ShapeAction::Off)
                }
            };
            let action = &mut self.0[channel as usize];
            *action = wanted.max(*action);
        }
        self
    }
}

/// The system's setting: channels that it doesn't name get their default action.
impl From<&ShapeSetting> for ShapePolicy {
    fn from(setting: &ShapeSetting) -> Self {
        match setting {
            ShapeSetting::All(true) => Self::default(),
            ShapeSetting::All(false) => Self::OFF,
            ShapeSetting::Each(actions) => Self(Channel::ALL.map(|channel| {
                actions
                    .get(&channel)
                    .copied()
                    .unwrap_or(channel.default_action())
            })),
        }
    }
}

impl Default for ShapeSetting {
    fn default() -> Self {
        Self::All(true)
    }
}

/// Hand-written because an untagged enum doesn't report which key or value is wrong.
impl<'de> Deserialize<'de> for ShapeSetting {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct SettingVisitor;

        impl<'de> Visitor<'de> for SettingVisitor {
            type Value = ShapeSetting;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str(
                    "true, false, or an action (refuse, flag, off) for some of \
                     env, argv, stdin, files, archives, patches, seeds",
                )
            }

            fn visit_bool<E>(self, value: bool) -> Result<ShapeSetting, E> {
                Ok(ShapeSetting::All(value))
            }

            fn visit_map<A: MapAccess<'de>>(
                self,
                mut members: A,
            ) -> Result<ShapeSetting, A::Error> {
                let mut actions = BTreeMap::new();
                while let Some((channel, action)) = members.next_entry()? {
                    actions.insert(channel, action);
                }
                Ok(ShapeSetting::Each(actions))
            }
        }

        deserializer.deserialize_any(SettingVisitor)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn setting(value: serde_json::Value) -> ShapeSetting {
        serde_json::from_value(value).expect("a setting")
    }

    #[test]
    fn a_setting_is_true_false_or_a_table_of_overrides() {
        use ShapeAction::{Flag, Off, Refuse};
        assert_eq!(
            ShapePolicy::from(&setting(json!(true))),
            ShapePolicy::default()
        );
        assert!(ShapePolicy::from(&setting(json!(false))).is_off());
        let policy = ShapePolicy::from(&setting(json!({"files": "refuse", "stdin": "off"})));
        let actions = Channel::ALL.map(|channel| policy.action(channel));
        assert_eq!(actions, [Refuse, Refuse, Off, Refuse, Flag, Flag, Flag]);
    }

    #[test]
    fn a_wrong_key_and_a_wrong_action_are_named() {
        for (value, named) in [
            (json!({"file": "flag"}), "`file`"),
            (json!({"files": "deny"}), "`deny`"),
            (json!("flag"), "true, false, or an action"),
        ] {
            let error = serde_json::from_value::<ShapeSetting>(value)
                .expect_err("wrong")
                .to_string();
            assert!(error.contains(named), "{error}");
        }
    }

    #[test]
    fn a_project_tightens_and_never_loosens() {
        let all = [ShapeAction::Off, ShapeAction::Flag, ShapeAction::Refuse];
        for system in all {
            for project in all {
                let system_policy = ShapePolicy([system; 7]);
                let tightened = system_policy.tightened(&ShapeSetting::Each(
                    Channel::ALL.map(|channel| (channel, project)).into(),
                ));
                assert_eq!(tightened, ShapePolicy([system.max(project); 7]));
            }
            let system_policy = ShapePolicy([system; 7]);
            assert_eq!(
                system_policy.tightened(&ShapeSetting::All(false)),
                system_policy
            );
            assert_eq!(
                system_policy
                    .tightened(&setting(json!({"env": "refuse"})))
                    .action(Channel::Files),
                system
            );
        }
        assert_eq!(
            ShapePolicy::OFF.tightened(&ShapeSetting::All(true)),
            ShapePolicy::default()
        );
    }
}
