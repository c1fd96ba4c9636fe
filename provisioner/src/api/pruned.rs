//! Pruned objects: objects without `metadata.managedFields`.
//!
//! The managed fields record which writer set which field. They are half of the bytes of a PersistentVolume and take more than
//! half of the time to parse, because each writer has a tree of maps. This process does not need them, so the deserializer skips
//! them. The parsed object is behind a pointer: a PersistentVolume takes about 3,500 bytes, and each of the dozen streams
//! through which a watch event passes would copy it.

use std::{borrow::Cow, fmt, ops::Deref};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::Resource;
use serde::{
    Serialize, Serializer,
    de::{
        Deserialize, DeserializeSeed, Deserializer, Error, IgnoredAny, IntoDeserializer, MapAccess, Visitor,
    },
};

/// The path of the managed fields in every object.
const MANAGED_FIELDS: &[&str] = &["metadata", "managedFields"];

/// An object without its managed fields.
#[derive(Debug, Clone)]
pub(crate) struct Pruned<K>(Box<K>);

impl<K> Pruned<K> {
    pub(crate) fn into_inner(self) -> K {
        *self.0
    }
}

impl<K> From<K> for Pruned<K> {
    fn from(object: K) -> Self {
        Pruned(Box::new(object))
    }
}

impl<K> Deref for Pruned<K> {
    type Target = K;

    fn deref(&self) -> &K {
        &self.0
    }
}

impl<'de, K: Deserialize<'de>> Deserialize<'de> for Pruned<K> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        K::deserialize(SkipEntry { path: MANAGED_FIELDS, inner: deserializer }).map(Self::from)
    }
}

impl<K: Serialize> Serialize for Pruned<K> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.0.serialize(serializer)
    }
}

impl<K: Resource> Resource for Pruned<K> {
    type DynamicType = K::DynamicType;
    type Scope = K::Scope;

    fn kind(dynamic: &K::DynamicType) -> Cow<'_, str> {
        K::kind(dynamic)
    }

    fn group(dynamic: &K::DynamicType) -> Cow<'_, str> {
        K::group(dynamic)
    }

    fn version(dynamic: &K::DynamicType) -> Cow<'_, str> {
        K::version(dynamic)
    }

    fn plural(dynamic: &K::DynamicType) -> Cow<'_, str> {
        K::plural(dynamic)
    }

    fn meta(&self) -> &ObjectMeta {
        self.0.meta()
    }

    fn meta_mut(&mut self) -> &mut ObjectMeta {
        self.0.meta_mut()
    }
}

/// A deserializer, visitor or seed that skips the entry at a path of map keys.
struct SkipEntry<T> {
    path: &'static [&'static str],
    inner: T,
}

impl<T> SkipEntry<T> {
    fn of<U>(&self, inner: U) -> SkipEntry<U> {
        SkipEntry { path: self.path, inner }
    }
}

/// Forwards the methods of a deserializer that can yield a map.
macro_rules! forward {
    ($($method:ident($($argument:ident: $type:ty),*);)*) => {
        $(fn $method<V: Visitor<'de>>(self, $($argument: $type,)* visitor: V) -> Result<V::Value, D::Error> {
            let visitor = self.of(visitor);
            self.inner.$method($($argument,)* visitor)
        })*
    };
}

impl<'de, D: Deserializer<'de>> Deserializer<'de> for SkipEntry<D> {
    type Error = D::Error;

    forward! {
        deserialize_any();
        deserialize_map();
        deserialize_option();
        deserialize_struct(name: &'static str, fields: &'static [&'static str]);
    }

    serde::forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf unit unit_struct
        newtype_struct seq tuple tuple_struct enum identifier ignored_any
    }

    fn is_human_readable(&self) -> bool {
        self.inner.is_human_readable()
    }
}

/// A value that is not a map has no such entry and is not an object either. The inner visitor rejects it.
impl<'de, V: Visitor<'de>> Visitor<'de> for SkipEntry<V> {
    type Value = V::Value;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.expecting(formatter)
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<V::Value, A::Error> {
        self.inner.visit_map(Entries { path: self.path, map, is_on_path: false })
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<V::Value, D::Error> {
        let deserializer = self.of(deserializer);
        self.inner.visit_some(deserializer)
    }

    fn visit_none<E: Error>(self) -> Result<V::Value, E> {
        self.inner.visit_none()
    }

    fn visit_unit<E: Error>(self) -> Result<V::Value, E> {
        self.inner.visit_unit()
    }
}

impl<'de, S: DeserializeSeed<'de>> DeserializeSeed<'de> for SkipEntry<S> {
    type Value = S::Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<S::Value, D::Error> {
        let deserializer = self.of(deserializer);
        self.inner.deserialize(deserializer)
    }
}

/// A map on the path, or the map that contains the skipped entry.
struct Entries<A> {
    path: &'static [&'static str],
    map: A,
    /// `true` if the path continues in the next value.
    is_on_path: bool,
}

impl<'de, A: MapAccess<'de>> MapAccess<'de> for Entries<A> {
    type Error = A::Error;

    fn next_key_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<Option<S::Value>, A::Error> {
        while let Some(key) = self.map.next_key::<String>()? {
            self.is_on_path = self.path.first().is_some_and(|first| *first == key);
            if self.is_on_path && self.path.len() == 1 {
                self.map.next_value::<IgnoredAny>()?;
                continue;
            }
            return seed.deserialize(key.into_deserializer()).map(Some);
        }
        Ok(None)
    }

    fn next_value_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<S::Value, A::Error> {
        if self.is_on_path {
            self.map.next_value_seed(SkipEntry { path: &self.path[1..], inner: seed })
        } else {
            self.map.next_value_seed(seed)
        }
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
    use kube::core::WatchEvent;
    use rstest::rstest;
    use serde_json::{Value, json};

    use super::*;
    use crate::testing::fixtures;

    fn written() -> Value {
        json!([{
            "manager": "kubectl", "operation": "Update", "apiVersion": "v1", "fieldsType": "FieldsV1",
            "fieldsV1": {"f:metadata": {"f:managedFields": {".": {}}}},
        }])
    }

    #[test]
    fn only_managed_fields_are_skipped() {
        let volume = fixtures::volume(json!({}));
        let mut text = serde_json::to_value(&volume).unwrap();
        text["metadata"]["managedFields"] = written();
        assert_eq!(
            serde_json::from_value::<Pruned<PersistentVolume>>(text.clone()).unwrap().into_inner(),
            volume
        );
        let event = json!({"type": "MODIFIED", "object": text}).to_string();
        let Ok(WatchEvent::Modified(read)) =
            serde_json::from_str::<WatchEvent<Pruned<PersistentVolume>>>(&event)
        else {
            panic!("{event}")
        };
        assert_eq!(read.into_inner(), volume);
    }

    #[test]
    fn an_entry_of_that_name_at_another_path_is_kept() {
        let labels = json!({"managedFields": "mine", "metadata": "too"});
        let claim = fixtures::claim(json!({"metadata": {"labels": labels, "annotations": labels}}));
        let text = serde_json::to_string(&claim).unwrap();
        let read: Pruned<PersistentVolumeClaim> = serde_json::from_str(&text).unwrap();
        assert_eq!(serde_json::to_string(&read).unwrap(), text);
    }

    #[rstest]
    #[case::no_metadata("{}")]
    #[case::metadata_of_nothing(r#"{"metadata": {}}"#)]
    #[case::null_metadata(r#"{"metadata": null}"#)]
    #[case::metadata_of_another_kind(r#"{"metadata": "text"}"#)]
    #[case::metadata_is_a_list(r#"{"metadata": [1]}"#)]
    #[case::another_version(r#"{"apiVersion": "v2", "metadata": {}}"#)]
    #[case::no_object("[]")]
    #[case::nothing("null")]
    #[case::cut_off(r#"{"metadata": {"managedFields": [{"#)]
    fn invalid_objects_are_rejected_as_without_pruning(#[case] text: &str) {
        let lean = serde_json::from_str::<Pruned<PersistentVolume>>(text).ok().map(Pruned::into_inner);
        assert_eq!(lean, serde_json::from_str::<PersistentVolume>(text).ok());
    }
}
