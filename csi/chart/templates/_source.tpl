{{/*
The objects of csi/deploy, read from its files behind the link csi/chart/deploy.

These templates add objects to the list "items" of a dictionary, because a template returns only text.
*/}}

{{/*
Returns the prefix of the names of all objects: none for a release with the name loopfs, and RELEASE- for any other.
*/}}
{{- define "loopfs.prefix" -}}
{{- if ne .Release.Name "loopfs" -}}
{{- printf "%s-" .Release.Name -}}
{{- end -}}
{{- end -}}

{{/*
Returns the namespace of the driver.
*/}}
{{- define "loopfs.namespace" -}}
{{- .Values.namespace.name | default (printf "%sloopfs-system" (include "loopfs.prefix" .)) -}}
{{- end -}}

{{/*
Returns a file of csi/deploy in which the values replace the defaults. The defaults are replaced in two steps, because a value may
contain the default of another one: a data directory below /var/lib/kubelet, for example. Between the two steps, the names of objects
get their prefix. The Lease of the controller keeps its name, which is part of the program, and so do labels: both are in the namespace
of the driver.

Context: "root" is the context of the chart, "path" the path below csi/deploy.
*/}}
{{- define "loopfs.file" -}}
{{- $text := .root.Files.Get (printf "deploy/%s" .path) -}}
{{- if not $text -}}
{{- fail (printf "read deploy/%s of the chart: there is no such file; use the chart of a checkout, where csi/chart/deploy is a link to csi/deploy, or an archive of helm package" .path) -}}
{{- end -}}
{{- $values := .root.Values -}}
{{- $replacements := list
  (list "csi.loopfs.dev" $values.driverName)
  (list "loopfs-system" (include "loopfs.namespace" .root))
  (list "/var/lib/loopfs/data" $values.dataDir)
  (list "/var/lib/loopfs" (dir $values.dataDir))
  (list "/var/lib/kubelet" $values.kubeletDir)
-}}
{{- range $index, $replacement := $replacements -}}
{{- $text = replace (first $replacement) (printf "@@%d@@" $index) $text -}}
{{- end -}}
{{- with include "loopfs.prefix" .root -}}
{{- /* Names of objects, and references to them in fields. */ -}}
{{- $text = regexReplaceAll "(?m)^([ -]*(?:name|policyName|serviceAccountName|value): )loopfs-" $text (printf "${1}%sloopfs-" .) -}}
{{- $text = regexReplaceAll "(?m)^  name: loopfs$" $text (printf "  name: %sloopfs" .) -}}
{{- /* Names in lists of RBAC and in expressions of policies. */ -}}
{{- $names := "(:|\\[\"|(?:subject|roleRef|owner)\\.name == \")loopfs-(\\(|provisioner|controller\\$|objects|claim-labels)" -}}
{{- $text = regexReplaceAll $names $text (printf "${1}%sloopfs-${2}" .) -}}
{{- $text = replace "name.startsWith(\"loopfs\")" (printf "name.startsWith(\"%sloopfs\")" .) $text -}}
{{- end -}}
{{- range $index, $replacement := $replacements -}}
{{- $text = replace (printf "@@%d@@" $index) (last $replacement) $text -}}
{{- end -}}
{{- $text -}}
{{- end -}}

{{/*
Adds the objects of a file.

Context: "root", "path", and "objects", the dictionary with the list.
*/}}
{{- define "loopfs.read" -}}
{{- $objects := .objects -}}
{{- $path := .path -}}
{{- range $text := regexSplit "(?m)^---\\s*$" (include "loopfs.file" (dict "root" .root "path" .path)) -1 -}}
{{- $object := fromYaml $text -}}
{{- if hasKey $object "Error" -}}
{{- fail (printf "parse deploy/%s with the values: %s" $path $object.Error) -}}
{{- end -}}
{{- if $object -}}
{{- $_ := set $objects "items" (append $objects.items $object) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/*
Adds the objects of a component, and applies its patches to the objects that are in the list. It knows the forms of patches that
csi/deploy has, and fails for any other.

The patch of labels is left out: Helm sets app.kubernetes.io/managed-by of all its objects itself.

Context: "root", "component", the directory, and "objects".
*/}}
{{- define "loopfs.component" -}}
{{- $root := .root -}}
{{- $component := .component -}}
{{- $objects := .objects -}}
{{- $kustomization := fromYaml (include "loopfs.file" (dict "root" $root "path" (printf "%s/kustomization.yaml" $component))) -}}
{{- range $resource := $kustomization.resources -}}
{{- $_ := include "loopfs.read" (dict "root" $root "path" (printf "%s/%s" $component $resource) "objects" $objects) -}}
{{- end -}}
{{- range $patch := $kustomization.patches -}}
{{- if has $patch.target.kind (list "DaemonSet" "Deployment") -}}
{{- range $object := $objects.items -}}
{{- if eq $object.kind $patch.target.kind -}}
{{- $_ := include "loopfs.patch" (dict "component" $component "patch" $patch.patch "pod" $object.spec.template.spec) -}}
{{- end -}}
{{- end -}}
{{- else -}}
{{- range $operation := fromYamlArray $patch.patch -}}
{{- if ne $operation.path "/metadata/labels" -}}
{{- fail (printf "apply deploy/%s: the chart knows no patch of %s in objects of the kind %s; add it to csi/chart/templates/_source.tpl" $component $operation.path $patch.target.kind) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/*
Applies a patch of a component to the pods of the DaemonSet or the Deployment: an added container, or environment variables of a container.

Context: "component", "patch", the text, and "pod", the specification of the pods.
*/}}
{{- define "loopfs.patch" -}}
{{- $component := .component -}}
{{- $pod := .pod -}}
{{- if hasPrefix "- " (trim .patch) -}}
{{- range $operation := fromYamlArray .patch -}}
{{- if or (ne $operation.op "add") (ne $operation.path "/spec/template/spec/containers/-") -}}
{{- fail (printf "apply deploy/%s: the chart knows no operation %s of %s; add it to csi/chart/templates/_source.tpl" $component $operation.op $operation.path) -}}
{{- end -}}
{{- $_ := set $pod "containers" (append $pod.containers $operation.value) -}}
{{- end -}}
{{- else -}}
{{- $patched := (fromYaml .patch).spec.template.spec -}}
{{- if omit $patched "containers" -}}
{{- fail (printf "apply deploy/%s: the chart knows only patches of containers; add others to csi/chart/templates/_source.tpl" $component) -}}
{{- end -}}
{{- range $change := $patched.containers -}}
{{- if omit $change "name" "env" -}}
{{- fail (printf "apply deploy/%s: the chart knows only patches of the variables of the container %s; add others to csi/chart/templates/_source.tpl" $component $change.name) -}}
{{- end -}}
{{- range $container := $pod.containers -}}
{{- if eq $container.name $change.name -}}
{{- range $variable := $change.env -}}
{{- $env := list -}}
{{- range $present := $container.env -}}
{{- if ne $present.name $variable.name -}}
{{- $env = append $env $present -}}
{{- end -}}
{{- end -}}
{{- $_ := set $container "env" (append $env $variable) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
