//! Tests that every declaration and every object that an API server can hold is accepted: complete, incomplete and unusual ones.

use k8s_openapi::api::core::v1::ConfigMap;
use proptest::prelude::*;
use serde_json::Value;

use super::declaration;
use super::kinds::ManagedKind;
use super::plan::{self, ObjectAction};
use crate::testing::fixtures;
use crate::testing::malformed_object_tests::{damaged, damages};

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn malformed_managed_objects_can_be_compared(of_declared in damages(), of_found in damages(), ours in any::<bool>()) {
        let identity = fixtures::identity();
        let manifests = [
            include_str!("../../../../csi/deploy/csidriver.yaml"),
            include_str!("../../../../csi/deploy/storageclass.yaml"),
            include_str!("../../../../csi/deploy/rbac.yaml"),
        ];
        for whole in declaration::parse(&config_map(&manifests), "loopfs-system", &identity).unwrap().objects.values() {
            let mut found = whole.clone();
            if !ours {
                found.metadata.labels = None;
            }
            let (mut declared, found) = (damaged(whole, &of_declared), damaged(&found, &of_found));
            // The parser adds these labels to every declared object.
            if let Some(declared) = &mut declared {
                declared.metadata.labels.get_or_insert_default().extend(declaration::labels(&identity));
            }
            let kind = ManagedKind::named(&whole.types.as_ref().unwrap().kind).unwrap();
            let action = plan::action(kind, declared.as_ref(), found.as_ref(), &identity);
            // Objects of other owners are never written.
            if let (Some(found), Some(ObjectAction::Update { .. } | ObjectAction::Replace { .. } | ObjectAction::Remove(_))) = (&found, &action) {
                prop_assert!(declaration::is_ours(found, &identity));
            }
            if let Some(ObjectAction::Update { object, .. }) = &action {
                // The updated object needs no further action.
                prop_assert_eq!(plan::action(kind, declared.as_ref(), Some(object), &identity), None);
            }
        }
    }

    #[test]
    fn any_declaration_text_is_never_fatal(text in "\\PC{0,200}", of_driver in damages()) {
        let identity = fixtures::identity();
        let driver: Value = serde_norway::from_str(include_str!("../../../../csi/deploy/csidriver.yaml")).unwrap();
        for text in [text, damaged(&driver, &of_driver).unwrap_or_default().to_string()] {
            if let Err(error) = declaration::parse(&config_map(&[&text]), "loopfs-system", &identity) {
                prop_assert!(!error.is_empty());
            }
        }
    }
}

fn config_map(files: &[&str]) -> ConfigMap {
    let data = files.iter().enumerate().map(|(number, text)| (number.to_string(), (*text).to_owned()));
    ConfigMap { data: Some(data.collect()), ..ConfigMap::default() }
}
